"""An answer from features equals the whole model's answer on pixels, whatever else is in the batch."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from decoder_service.engine.engine import Limits, RequestTimings, Sampling, TokenOutput
from decoder_service.engine.loop import EngineLoop
from shared.errors import FeatureRevisionMismatch, InvalidRequest
from tests.unit.engine.fake_runner import collect
from tests.unit.engine.reference import OUTPUT_TOKENS, Question, Reference

QUESTIONS = [
    Question((), "hello"),
    Question(("square",), "what is this?"),
    Question(("large",), "describe it"),
    Question(("wide", "tall"), "which one has the red circle?"),
    Question((), "a much longer question, without any picture, about the weather and the sea " * 3),
    Question(("square", "square", "wide"), "same?"),
    Question(("clip",), "which way does it move?"),
    Question(("tall", "clip", "square"), "what is in all of them?"),
]


@asynccontextmanager
async def running(engine: EngineLoop) -> AsyncIterator[EngineLoop]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        yield engine
        await engine.close()


async def ask_all(
    reference: Reference, engine: EngineLoop, questions: Sequence[Question]
) -> list[list[TokenOutput]]:
    requests = [reference.request(str(number), each) for number, each in enumerate(questions)]
    async with running(engine):
        return await asyncio.gather(*(collect(engine, request) for request in requests))


async def test_a_mixed_batch_equals_the_whole_model(any_reference: Reference) -> None:
    """G01, G03, G04, G06, G07: prompt lengths from 10 to 250 tokens, in one batch."""
    expected = [any_reference.ask(question) for question in QUESTIONS]
    answers = await ask_all(any_reference, any_reference.engine(), QUESTIONS)
    assert len({each.tokens for each in expected}) == len(QUESTIONS)
    assert [each.is_met_by(answer) for each, answer in zip(expected, answers, strict=True)] == [True] * 8


@pytest.mark.parametrize("budget", [8, 13, 37])
async def test_chunks_may_end_anywhere(reference: Reference, budget: int) -> None:
    """In the middle of a picture, between two, one token before the end of a prompt."""
    expected = [reference.ask(question) for question in QUESTIONS]
    answers = await ask_all(reference, reference.engine(tokens=budget), QUESTIONS)
    assert all(each.is_met_by(answer) for each, answer in zip(expected, answers, strict=True))


async def test_single_mode_gives_the_same_answers(reference: Reference) -> None:
    expected = [reference.ask(question) for question in QUESTIONS]
    answers = await ask_all(reference, reference.engine(size=1), QUESTIONS)
    assert all(each.is_met_by(answer) for each, answer in zip(expected, answers, strict=True))


async def test_random_arrivals_and_departures_change_no_answer(reference: Reference) -> None:
    expected = [reference.ask(question) for question in QUESTIONS]
    rng = random.Random(0)
    async with running(reference.engine(size=4, tokens=48)) as engine:

        async def arrive(number: int) -> list[TokenOutput]:
            await asyncio.sleep(rng.random() * 0.2)
            request = reference.request(str(number), QUESTIONS[number % len(QUESTIONS)])
            if number % 3:
                return await collect(engine, request)
            async with asyncio.timeout(rng.random() * 0.2):
                return await collect(engine, request)

        answers = await asyncio.gather(*map(arrive, range(48)), return_exceptions=True)
    finished = [(n, answer) for n, answer in enumerate(answers) if isinstance(answer, list)]
    assert len(finished) >= 32
    assert all(expected[n % len(QUESTIONS)].is_met_by(answer) for n, answer in finished)


async def test_the_first_token_s_log_probabilities_are_the_reference_s(reference: Reference) -> None:
    async with running(reference.engine()) as engine:
        for number, question in enumerate(QUESTIONS):
            request = reference.request(str(number), question, sampling=Sampling(top_logprobs=20))
            first = (await collect(engine, request))[0]
            expected = reference.ask(question).logits[0].log_softmax(0)
            assert [each.token_id for each in first.top] == expected.topk(20).indices.tolist()
            assert [each.logprob for each in first.top] == pytest.approx(
                expected.topk(20).values.tolist(), abs=1e-4
            )
            assert first.logprob == first.top[0].logprob


async def test_min_output_tokens_forbids_the_end_as_the_reference_does(reference: Reference) -> None:
    """With a frequent token declared a stop token, so that it would come at once."""
    question = QUESTIONS[1]
    early = frozenset(reference.ask(question).tokens[:3])
    expected = reference.ask(question, min_new_tokens=8, eos_token_id=list(early))
    limits = Limits(OUTPUT_TOKENS, min_output_tokens=8, stop_token_ids=early | {10**9})
    async with running(reference.engine()) as engine:
        answer = await collect(engine, reference.request("a", question, limits=limits))
    assert len(answer) >= 8
    assert replace(expected, stops=early).is_met_by(answer)


@pytest.mark.parametrize("cut", [1, 5, OUTPUT_TOKENS - 1])
async def test_a_resumed_answer_goes_on_as_if_never_cut(reference: Reference, cut: int) -> None:
    question = QUESTIONS[3]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        async with running(reference.engine()) as engine:
            whole = await collect(engine, reference.request("a", question, sampling=sampling))
            begun = tuple(output.token_id for output in whole[:cut] if output.token_id is not None)
            resumed = reference.request("b", question, sampling=sampling, continuation=begun)
            assert await collect(engine, resumed) == whole[cut:]


async def test_each_request_of_a_batch_keeps_its_own_rules(reference: Reference) -> None:
    """G09, G12: ten rounds, shuffled; a seeded answer is the same alone and among neighbours."""
    question = QUESTIONS[1]
    seeded = Sampling(temperature=1.2, seed=42)
    async with running(reference.engine()) as engine:
        greedy = await collect(engine, reference.request("g", question, limits=Limits(5)))
        alone = await collect(engine, reference.request("s", question, sampling=seeded, limits=Limits(20)))
        for round_number in range(10):
            requests = [
                reference.request(f"g{round_number}", question, limits=Limits(5)),
                reference.request(f"s{round_number}", question, sampling=seeded, limits=Limits(20)),
                reference.request(f"u{round_number}", question, sampling=Sampling(temperature=2.0)),
            ]
            random.Random(round_number).shuffle(requests)
            answers = await asyncio.gather(*(collect(engine, request) for request in requests))
            by_name = {each.request_id[0]: answer for each, answer in zip(requests, answers, strict=True)}
            assert (by_name["g"], by_name["s"]) == (greedy, alone)


async def test_a_seed_gives_the_same_text_alone_and_among_fifteen_neighbours(reference: Reference) -> None:
    """G12: neighbours with rules, lengths and pictures of their own, on every round others."""
    sampling = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=42)
    async with running(reference.engine(size=16, tokens=64)) as engine:
        alone = await collect(
            engine, reference.request("alone", QUESTIONS[3], sampling=sampling, limits=Limits(24))
        )
        for round_number in range(4):
            neighbours = [
                reference.request(
                    f"{round_number}/{number}",
                    QUESTIONS[(number + round_number) % len(QUESTIONS)],
                    sampling=Sampling(temperature=number / 5, top_k=number, frequency_penalty=number / 20),
                    limits=Limits(4 + 2 * number),
                )
                for number in range(15)
            ]
            asked = reference.request(
                f"seeded {round_number}", QUESTIONS[3], sampling=sampling, limits=Limits(24)
            )
            neighbours.insert(round_number * 4, asked)
            answers = await asyncio.gather(*(collect(engine, request) for request in neighbours))
            assert answers[round_number * 4] == alone


async def test_a_penalty_on_large_pictures_leaves_a_neighbour_as_alone(
    reference: Reference,
) -> None:
    """G23."""
    plain, pictured = QUESTIONS[0], Question(("large", "large", "large"), "describe it")
    async with running(reference.engine(size=4)) as engine:
        for number in range(3):
            answers = await asyncio.gather(
                collect(engine, reference.request(f"plain {number}", plain)),
                collect(
                    engine,
                    reference.request(f"b{number}", pictured, sampling=Sampling(repetition_penalty=1.3)),
                ),
            )
            assert reference.ask(plain).is_met_by(answers[0])


async def test_two_answers_without_a_seed_differ(reference: Reference) -> None:
    async with running(reference.engine()) as engine:
        requests = [
            reference.request(str(n), QUESTIONS[0], sampling=Sampling(temperature=2.0)) for n in range(2)
        ]
        first, second = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert first != second


@pytest.mark.parametrize("level", range(4))
async def test_no_level_of_the_features_is_without_effect(reference: Reference, level: int) -> None:
    """Level 0 are the main features, then come the DeepStack levels."""
    question = QUESTIONS[2]
    bundle = reference.bundle("large")
    tensor = bundle.tensor.clone()
    tensor[:, level * bundle.hidden_size : (level + 1) * bundle.hidden_size] = 0
    request = reference.request("a", question, bundles=(replace(bundle, tensor=tensor),))
    async with running(reference.engine()) as engine:
        assert not reference.ask(question).is_met_by(await collect(engine, request))


async def test_features_are_only_read(reference: Reference) -> None:
    """A process cache gives many requests the same tensors, also at the same time."""
    question, bundle = QUESTIONS[1], reference.bundle("square")
    before = bundle.tensor.clone()
    requests = [reference.request(str(number), question, bundles=(bundle,)) for number in range(4)]
    async with running(reference.engine(tokens=13)) as engine:
        answers = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert torch.equal(bundle.tensor, before)
    assert all(reference.ask(question).is_met_by(answer) for answer in answers)


async def test_bad_features_fail_alone(reference: Reference) -> None:
    """B01."""
    good = reference.bundle("square")
    spoiled = good.tensor.clone()
    spoiled[3, 5] = torch.nan
    narrow = replace(good, tensor=good.tensor[:, : 3 * good.hidden_size].contiguous(), deepstack_levels=2)
    question = QUESTIONS[1]
    bad = [
        reference.request("nan", question, bundles=(replace(good, tensor=spoiled),)),
        reference.request("level", question, bundles=(narrow,)),
        reference.request("other", question, bundles=(reference.bundle("large"),)),
        reference.request("two", question, bundles=(good, good)),
        reference.request("integers", question, bundles=(replace(good, tensor=good.tensor.int()),)),
        reference.request("tokens", question, continuation=(5, 10**6)),
        reference.request("negative", question, continuation=(-1,)),
    ]
    async with running(reference.engine(size=16)) as engine:
        answers = await asyncio.gather(
            collect(engine, reference.request("good", question)),
            *(collect(engine, request) for request in bad),
            collect(engine, reference.request("fine", question)),
            return_exceptions=True,
        )
    assert reference.ask(question).is_met_by(answers[0])  # type: ignore[arg-type]
    assert answers[0] == answers[-1]
    errors = [type(answer) for answer in answers[1:-1]]
    assert errors == [InvalidRequest, FeatureRevisionMismatch, *[InvalidRequest] * 5]


async def test_half_precision_drifts_little_with_the_batch(reference: Reference) -> None:
    """G08: in bfloat16 neighbours change the last bits, at the first token by less than 0.1 nats."""
    asked = Sampling(top_logprobs=1)

    async def first_logprobs(size: int) -> list[float]:
        requests = [reference.request(str(n), each, sampling=asked) for n, each in enumerate(QUESTIONS)]
        async with running(reference.engine(size=size, dtype=torch.bfloat16)) as engine:
            answers = await asyncio.gather(*(collect(engine, request) for request in requests))
        return [answer[0].logprob or 0.0 for answer in answers]

    assert await first_logprobs(1) == pytest.approx(await first_logprobs(8), abs=0.1)


async def test_timings_of_a_real_request(reference: Reference) -> None:
    timings = RequestTimings()
    async with running(reference.engine()) as engine:
        outputs = [each async for each in engine.generate(reference.request("a", QUESTIONS[1]), timings)]
    assert outputs[-1][-1].finish in ("stop", "length")
    assert timings.first_token is not None
