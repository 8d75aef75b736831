"""Prefixes that are reused and answers that are interrupted change no answer."""

import asyncio
import random
from dataclasses import replace

import pytest

from decoder_service.engine.engine import Limits, RequestTimings, Sampling, TokenOutput
from decoder_service.engine.loop import EngineLoop
from tests.decoder_fakes import HeldTensors
from tests.unit.engine.fake_runner import collect
from tests.unit.engine.reference import Question, Reference
from tests.unit.engine.test_equality import QUESTIONS, ask_all, running

SAME_PICTURE = [
    Question(("large",), text) for text in ("describe it", "what is this?", "how many are there?", "describe")
]


async def reused_by(
    engine: EngineLoop, reference: Reference, question: Question
) -> tuple[int, list[TokenOutput]]:
    timings = RequestTimings()
    request = reference.request(f"r{random.random()}", question)
    outputs = [each async for outputs in engine.generate(request, timings) for each in outputs]
    return timings.reused_tokens, outputs


async def test_asked_again_everything_is_answered_the_same_from_the_cache(any_reference: Reference) -> None:
    expected = [any_reference.ask(question) for question in QUESTIONS]
    async with running(any_reference.engine()) as engine:
        for round_number in range(2):
            for question, each in zip(QUESTIONS, expected, strict=True):
                reused, outputs = await reused_by(engine, any_reference, question)
                prompt = len(any_reference.prompt(question).token_ids)
                assert each.is_met_by(outputs)
                assert round_number == 0 or reused == (prompt - 1) // 16 * 16


@pytest.mark.parametrize("budget", [17, 1024])
async def test_questions_about_one_new_picture_at_once_prefill_it_once(
    reference: Reference, budget: int
) -> None:
    expected = [reference.ask(question) for question in SAME_PICTURE]
    engine = reference.engine(tokens=budget)
    requests = [reference.request(str(n), question) for n, question in enumerate(SAME_PICTURE)]
    timings = [RequestTimings() for _ in requests]

    async def ask(n: int) -> list[TokenOutput]:
        return [each async for outputs in engine.generate(requests[n], timings[n]) for each in outputs]

    async with running(engine):
        answers = await asyncio.gather(*map(ask, range(len(requests))))
    assert all(each.is_met_by(answer) for each, answer in zip(expected, answers, strict=True))
    assert sorted(each.reused_tokens > 0 for each in timings) == [False, True, True, True]


async def test_a_small_cache_interrupts_answers_and_changes_none(reference: Reference) -> None:
    questions = [question for question in QUESTIONS if len(reference.prompt(question).token_ids) < 90] * 3
    expected = [reference.ask(question) for question in questions]
    engine = reference.engine(blocks=7)
    answers = await ask_all(reference, engine, questions)
    assert all(each.is_met_by(answer) for each, answer in zip(expected, answers, strict=True))
    assert engine.stats().preempted > 0


async def test_an_interrupted_answer_with_a_seed_is_the_uninterrupted_one(reference: Reference) -> None:
    sampling, limits = Sampling(temperature=1.0, seed=7), Limits(60)
    requests = [
        reference.request(str(n), question, sampling=sampling, limits=limits)
        for n, question in enumerate(QUESTIONS[:4])
    ]
    async with running(reference.engine()) as engine:
        alone = [await collect(engine, request) for request in requests]
    small = reference.engine(blocks=18)
    async with running(small):
        together = await asyncio.gather(*(collect(small, request) for request in requests))
    assert together == alone
    assert small.stats().preempted > 0


async def test_the_same_text_about_another_picture_shares_nothing_of_it(reference: Reference) -> None:
    """Two pictures of one size: equal tokens, equal positions, different features."""
    question = Question(("large",), "describe it")
    bundle = reference.bundle("large")
    other = replace(bundle, tensor=bundle.tensor.flip(0).contiguous())
    async with running(reference.engine()) as engine:
        asked = [
            reference.request(name, question, bundles=(each,))
            for name, each in [("a", bundle), ("b", other), ("c", bundle), ("d", other)]
        ]
        answers = [await collect(engine, request) for request in asked]
    fresh = []
    for request in asked[:2]:
        async with running(reference.engine()) as engine:
            fresh.append(await collect(engine, request))
    assert answers == [*fresh, *fresh]
    assert fresh[0] != fresh[1]
    assert all(isinstance(request.features, HeldTensors) for request in asked)
    loads = [request.features.loads for request in asked if isinstance(request.features, HeldTensors)]
    assert loads == [[0, 0], [0, 0], [], []]


@pytest.mark.parametrize("steps", range(1, 8))
async def test_what_a_prefill_computed_before_it_was_given_up_is_right(
    reference: Reference, steps: int
) -> None:
    """Cut after some chunks of 13 tokens, its last block half full; then the same is asked again."""
    question = QUESTIONS[3]
    expected = reference.ask(question)
    engine = reference.engine(tokens=13)
    async with running(engine):
        leaving = asyncio.create_task(collect(engine, reference.request("gone", question)))
        for _ in range(200):
            if engine.stats().kv_blocks_used:
                break
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.003 * steps)
        leaving.cancel()
        await asyncio.wait({leaving})
        for number in range(2):
            assert expected.is_met_by(await collect(engine, reference.request(str(number), question)))
