"""Every rule of a generation over real gRPC: what arrives at the engine, what is refused, several samples."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decoder_service.engine.sequence import Priority
from decoder_service.prompt import PromptBuilder
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import FeatureNotFound, QueueFull
from shared.features.bundle import FeatureBundle
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as pb
from tests.feature_samples import make_bundle
from tests.rpc.scripted_decoder import (
    SECONDS,
    Decoder,
    own_key,
    refused,
    script,
    scripted_decoder,
    stream,
    task_of,
)
from tests.rpc.servers import eventually, failure_of

SamplingParams = pb.SamplingParams


def _sampled(**rules: Any) -> pb.GenerationTask:
    return task_of(sampling=SamplingParams(**rules))


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture
async def decoder(prompts: PromptBuilder) -> AsyncIterator[Decoder]:
    async with scripted_decoder(prompts) as running:
        yield running


async def _whole(decoder: Decoder, task: pb.GenerationTask) -> pb.GenerateResponse:
    response: pb.GenerateResponse = await decoder.stub.Generate(
        pb.GenerateRequest(task=task), timeout=SECONDS
    )
    return response


async def test_every_rule_arrives(decoder: Decoder) -> None:
    rules = SamplingParams(
        temperature=0.7,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={5: 2.5, 3: -100},
        seed=9,
    )
    await _whole(
        decoder, task_of(sampling=rules, stop_token_ids=[7], priority=pb.PRIORITY_HIGH, first_sample=4)
    )
    [request] = decoder.engine.requests
    sampling = request.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
    assert sampling.logit_bias == ((3, -100.0), (5, 2.5))
    assert (sampling.seed, sampling.sample_index) == (9, 4)
    assert request.priority is Priority.HIGH
    assert 7 in request.limits.stop_token_ids


async def test_what_is_unset_changes_nothing(decoder: Decoder) -> None:
    await _whole(decoder, task_of())
    [request] = decoder.engine.requests
    assert (request.sampling.repetition_penalty, request.sampling.min_p) == (1.0, 0.0)
    assert request.priority is Priority.NORMAL


async def test_ignore_eos_keeps_the_caller_s_own_stop_tokens(
    decoder: Decoder, prompts: PromptBuilder
) -> None:
    await _whole(decoder, task_of(stop_token_ids=[7]))
    await _whole(decoder, task_of(stop_token_ids=[7], ignore_eos=True))
    both, own = (request.limits.stop_token_ids for request in decoder.engine.requests)
    assert both == prompts.stop_token_ids | {7}
    assert own == {7}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
async def test_absurd_numbers_are_refused_by_name(decoder: Decoder, name: str, value: float) -> None:
    """G15."""
    failure = await refused(decoder, _sampled(**{name: value}))
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "INVALID_SAMPLING")
    assert failure.field == f"task.sampling.{name}"
    assert not decoder.engine.requests


@pytest.mark.parametrize(
    ("task", "reason", "field"),
    [
        (_sampled(top_p=-1), "INVALID_SAMPLING", "task.sampling.top_p"),
        (_sampled(top_k=-1), "INVALID_SAMPLING", "task.sampling.top_k"),
        (_sampled(min_p=1.1), "INVALID_SAMPLING", "task.sampling.min_p"),
        (_sampled(temperature=999999), "INVALID_SAMPLING", "task.sampling.temperature"),
        (_sampled(repetition_penalty=0), "INVALID_SAMPLING", "task.sampling.repetition_penalty"),
        (_sampled(repetition_penalty=1e-300), "INVALID_SAMPLING", "task.sampling.repetition_penalty"),
        (_sampled(repetition_penalty=-1), "INVALID_SAMPLING", "task.sampling.repetition_penalty"),
        (_sampled(presence_penalty=2.1), "INVALID_SAMPLING", "task.sampling.presence_penalty"),
        (_sampled(logit_bias={4: 101}), "INVALID_SAMPLING", "task.sampling.logit_bias[4]"),
        (_sampled(logit_bias={4: math.nan}), "INVALID_SAMPLING", "task.sampling.logit_bias[4]"),
        (
            _sampled(logit_bias=dict.fromkeys(range(1025), 1.0)),
            "INVALID_SAMPLING",
            "task.sampling.logit_bias",
        ),
        (_sampled(logit_bias={960: 1}), "INVALID_REQUEST", "task.sampling.logit_bias"),
        (_sampled(logit_bias={-1: 1}), "INVALID_REQUEST", "task.sampling.logit_bias"),
        (task_of(stop_token_ids=[960]), "INVALID_REQUEST", "task.stop_token_ids"),
        (task_of(stop_token_ids=[-1]), "INVALID_REQUEST", "task.stop_token_ids"),
        (task_of(stop_token_ids=range(65)), "INVALID_REQUEST", "task.stop_token_ids"),
        (task_of(continuation_token_ids=[2**31 - 1]), "INVALID_REQUEST", "task.continuation_token_ids"),
        (task_of(priority=17), "INVALID_REQUEST", "task.priority"),
        (task_of(sample_count=17), "INVALID_REQUEST", "task.sample_count"),
        (task_of(sample_count=-1), "INVALID_REQUEST", "task.sample_count"),
        (task_of(first_sample=1024), "INVALID_REQUEST", "task.first_sample"),
        (task_of(first_sample=-1), "INVALID_REQUEST", "task.first_sample"),
        (
            task_of(sample_count=2, continuation_token_ids=[1]),
            "INVALID_REQUEST",
            "task.continuation_token_ids",
        ),
        (task_of(max_output_tokens=-1), "INVALID_REQUEST", "task.max_output_tokens"),
    ],
)
async def test_what_is_out_of_range_is_refused_by_name(
    decoder: Decoder, task: pb.GenerationTask, reason: str, field: str
) -> None:
    """G15, G16."""
    failure = await refused(decoder, task)
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", reason, field)
    assert not decoder.engine.requests


async def test_several_samples_come_whole_and_each_with_its_end(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "a red circle")
    response = await _whole(decoder, task_of(sample_count=3, first_sample=5, return_token_ids=True))
    assert response.text == "a red circle"
    assert [sample.sample_index for sample in response.further_samples] == [6, 7]
    assert {sample.text for sample in response.further_samples} == {"a red circle"}
    assert all(list(s.token_ids) == list(decoder.engine.script) for s in response.further_samples)
    assert [each.sample_index for each in response.summary.samples] == [5, 6, 7]
    assert {each.finish_reason for each in response.summary.samples} == {pb.FINISH_REASON_STOP}
    assert response.summary.output_tokens == 3 * len(decoder.engine.script)
    assert [request.sampling.sample_index for request in decoder.engine.requests] == [5, 6, 7]


async def test_streamed_samples_say_whose_piece_it_is(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "a red circle")
    messages = await stream(decoder, task_of(sample_count=2))
    texts = {0: "", 1: ""}
    for message in messages[:-1]:
        texts[message.delta.sample_index] += message.delta.text
    assert texts == {0: "a red circle", 1: "a red circle"}
    assert len(messages[-1].summary.samples) == 2


async def test_samples_fetch_a_picture_once_and_let_it_go(decoder: Decoder) -> None:
    await decoder.store.put(own_key(), make_bundle())
    decoder.engine.script = script(decoder, "a red circle")
    picture = pb.Part(feature_key=str(own_key()))
    await _whole(decoder, task_of(picture, pb.Part(text="?"), sample_count=4))
    assert len(decoder.engine.features) == 4
    first = decoder.engine.features[0][0]
    assert isinstance(first, FeatureBundle)
    assert all(features[0] is first for features in decoder.engine.features)


async def test_a_caller_who_leaves_takes_all_samples_along(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "one two three four five six")
    call = decoder.stub.StreamGenerate(
        pb.StreamGenerateRequest(task=task_of(sample_count=3)), timeout=SECONDS
    )
    await call.read()
    decoder.engine.gate.clear()
    call.cancel()
    await eventually(lambda: decoder.engine.abandoned == 3)


@pytest.fixture
async def full(decoder: Decoder) -> Decoder:
    decoder.engine.error = QueueFull("64 requests wait already", retry_after_seconds=1.5)
    return decoder


async def test_one_refusal_refuses_all_samples(full: Decoder) -> None:
    failure = await refused(full, task_of(sample_count=3))
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


async def test_an_evicted_picture_is_not_answered_from_what_the_engine_remembers(decoder: Decoder) -> None:
    """The manifest in the store is the authority, whatever a cache still holds."""
    await decoder.store.put(own_key(), make_bundle())
    task = task_of(pb.Part(feature_key=str(own_key())), pb.Part(text="?"))
    await _whole(decoder, task)
    await decoder.store.delete(own_key())
    failure = await failure_of(decoder.stub.Generate(pb.GenerateRequest(task=task), timeout=SECONDS))
    assert failure.reason == FeatureNotFound.reason
    assert len(decoder.engine.requests) == 1


async def test_the_same_content_has_the_same_id_and_other_content_another(decoder: Decoder) -> None:
    task = task_of(pb.Part(feature_key=str(own_key())), pb.Part(text="?"))
    bundle = make_bundle()
    other = FeatureBundle(
        bundle.modality, bundle.grid, -bundle.tensor, bundle.hidden_size, bundle.deepstack_levels
    )
    for each in (bundle, bundle, other):
        await decoder.store.delete(own_key())
        await decoder.store.put(own_key(), each)
        await _whole(decoder, task)
    first, again, changed = (request.feature_ids for request in decoder.engine.requests)
    assert first == again != changed
    assert len({request.prefix_root for request in decoder.engine.requests}) == 1


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (pb.OutputFormat(), "task.output_format"),
        (pb.OutputFormat(regex="a("), "task.output_format.regex"),
        (pb.OutputFormat(json_schema='{"type": "strin"}'), "task.output_format.json_schema"),
        (pb.OutputFormat(choices=pb.Choices()), "task.output_format.choices"),
    ],
)
async def test_a_form_that_makes_no_sense_is_refused_by_name(
    decoder: Decoder, form: pb.OutputFormat, field: str
) -> None:
    failure = await refused(decoder, task_of(output_format=form))
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", "INVALID_REQUEST", field)
    assert not decoder.engine.requests


async def test_a_form_goes_to_each_sample_and_not_with_ignore_eos(decoder: Decoder) -> None:
    form = pb.OutputFormat(choices=pb.Choices(values=["red", "green"]))
    await _whole(decoder, task_of(output_format=form, sample_count=2))
    first, second = (request.grammar for request in decoder.engine.requests)
    assert first is not None
    assert first is not second
    failure = await refused(decoder, task_of(output_format=form, ignore_eos=True))
    assert failure.field == "task.ignore_eos"
