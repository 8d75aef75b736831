"""The decoder's contract over real gRPC, with a scripted engine and real prompts."""

from collections.abc import AsyncIterator

import grpc
import pytest

from decoder_service.prompt import PromptBuilder
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import QueueFull
from shared.features.grid import Grid
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as pb
from tests.feature_samples import make_bundle
from tests.rpc.scripted_decoder import (
    KEY,
    SECONDS,
    Decoder,
    generate,
    own_key,
    refused,
    script,
    scripted_decoder,
    stream,
    task_of,
)
from tests.rpc.servers import eventually, failure_of


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture
async def decoder(prompts: PromptBuilder) -> AsyncIterator[Decoder]:
    async with scripted_decoder(prompts) as running:
        yield running


async def test_text_is_answered_without_the_store(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "a red circle")
    response = await generate(decoder, task_of())
    assert response.text == "a red circle"
    assert response.summary.finish_reason == pb.FINISH_REASON_STOP
    assert response.summary.output_tokens == len(decoder.engine.script)
    assert not response.token_ids
    assert not response.logprobs


async def test_a_picture_is_bound_to_its_place(decoder: Decoder) -> None:
    bundle = make_bundle(grid=Grid(1, 8, 8))
    await decoder.store.put(own_key(), bundle)
    decoder.engine.script = script(decoder, "red")
    task = task_of(pb.Part(feature_key=str(own_key())), pb.Part(text="What is this?"))
    response = await generate(decoder, task)
    assert response.summary.visual_tokens == 16
    [request] = decoder.engine.requests
    [[(start, count)]] = request.prompt.visual_spans
    assert count == 16
    assert len(set(request.prompt.token_ids[start : start + count])) == 1


async def test_a_stream_is_deltas_and_one_summary(decoder: Decoder) -> None:
    text = "삼겹살 👩‍👩‍👧 世界"
    decoder.engine.script = script(decoder, text)
    messages = await stream(decoder, task_of(return_token_ids=True, top_logprobs=1))
    *deltas, last = messages
    assert last.HasField("summary")
    assert all(message.HasField("delta") for message in deltas)
    assert "".join(message.delta.text for message in deltas) == text
    assert tuple(token for message in deltas for token in message.delta.token_ids) == decoder.engine.script
    assert all(len(message.delta.logprobs) == len(message.delta.token_ids) for message in deltas)


async def test_a_resumed_stream_repeats_nothing(decoder: Decoder) -> None:
    text = "삼겹살 and 世界"
    decoder.engine.script = script(decoder, text)
    whole = [message.delta for message in await stream(decoder, task_of(return_token_ids=True))]
    for received in range(len(decoder.engine.script)):
        before = "".join(delta.text for delta in whole[:received])
        task = task_of(continuation_token_ids=decoder.engine.script[:received])
        rest = await stream(decoder, task)
        assert before + "".join(message.delta.text for message in rest) == text
        assert rest[-1].summary.output_tokens == len(decoder.engine.script)


async def test_a_stop_sequence_across_tokens(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "alpha beta gamma delta")
    response = await generate(decoder, task_of(stop_sequences=["beta gamma"]))
    assert response.text == "alpha "
    assert response.summary.finish_reason == pb.FINISH_REASON_STOP
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_every_missing_feature_is_named(decoder: Decoder) -> None:
    keys = [str(own_key(name)) for name in "bc"]
    failure = await refused(decoder, task_of(*(pb.Part(feature_key=key) for key in keys)))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")
    assert failure.message.startswith("2 of")
    assert not decoder.engine.requests


async def test_another_tenants_feature_is_like_a_missing_one(decoder: Decoder) -> None:
    await decoder.store.put(KEY, make_bundle())
    failure = await refused(decoder, task_of(pb.Part(feature_key=str(KEY))))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")


@pytest.mark.parametrize(
    ("task", "reason", "field"),
    [
        (pb.GenerationTask(), "INVALID_REQUEST", "task.turns"),
        (
            pb.GenerationTask(turns=[pb.Turn(parts=[pb.Part(text="x")])]),
            "INVALID_REQUEST",
            "task.turns[0].role",
        ),
        (pb.GenerationTask(turns=[pb.Turn(role=pb.ROLE_USER)]), "INVALID_REQUEST", "task.turns[0].parts"),
        (task_of(pb.Part()), "INVALID_REQUEST", "task.turns[0].parts[0]"),
        (
            task_of(pb.Part(text="x"), pb.Part(feature_key="a\r\nb")),
            "MALFORMED_FEATURE_KEY",
            "task.turns[0].parts[1].feature_key",
        ),
        (
            task_of(sampling=pb.SamplingParams(temperature=11)),
            "INVALID_SAMPLING",
            "task.sampling.temperature",
        ),
        (task_of(sampling=pb.SamplingParams(top_p=float("nan"))), "INVALID_SAMPLING", "task.sampling.top_p"),
        (task_of(max_output_tokens=0), "INVALID_REQUEST", "task.max_output_tokens"),
        (task_of(max_output_tokens=2**31 - 1), "INVALID_REQUEST", "task.max_output_tokens"),
        (task_of(pb.Part(text="x" * 2001)), "PROMPT_TOO_LONG", "task.turns"),
        (task_of(pb.Part(text="é1" * 500)), "PROMPT_TOO_LONG", "task.turns"),
    ],
)
async def test_bad_requests_name_their_field(
    decoder: Decoder, task: pb.GenerationTask, reason: str, field: str
) -> None:
    failure = await refused(decoder, task)
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", reason, field)
    assert not decoder.engine.requests


async def test_a_full_queue_says_when_to_come_back(decoder: Decoder) -> None:
    decoder.engine.error = QueueFull("64 requests wait already", retry_after_seconds=1.5)
    failure = await refused(decoder, task_of())
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


async def test_explicit_zero_is_not_unset(decoder: Decoder) -> None:
    await generate(decoder, task_of(sampling=pb.SamplingParams(temperature=0, top_p=0)))
    await generate(decoder, task_of())
    explicit, unset = (request.sampling for request in decoder.engine.requests)
    assert (explicit.temperature, explicit.top_p) == (0.0, 0.0)
    assert (unset.temperature, unset.top_p) == (0.0, 1.0)


async def test_a_cancelled_stream_leaves_the_engine(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "one two three four five six")
    call = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=task_of()), timeout=SECONDS)
    await call.read()
    decoder.engine.gate.clear()
    call.cancel()
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_a_deadline_ends_the_work(decoder: Decoder) -> None:
    decoder.engine.script = script(decoder, "one two")
    decoder.engine.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.stub.Generate(pb.GenerateRequest(task=task_of()), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_tokens_are_counted_without_the_engine(decoder: Decoder) -> None:
    await decoder.store.put(own_key(), make_bundle())
    parts = [pb.Part(feature_key=str(own_key())), pb.Part(text="What is this?")]
    turns = [pb.Turn(role=pb.ROLE_USER, parts=parts)]
    count = await decoder.stub.CountTokens(pb.CountTokensRequest(turns=turns), timeout=SECONDS)
    assert count.visual_tokens == 16
    assert count.input_tokens > 20
    assert count.context_tokens == 512
    assert not decoder.engine.requests


@pytest.mark.parametrize(
    ("part", "field"),
    [(pb.Part(feature_key="a"), "turns[0].parts[0].feature_key"), (pb.Part(text="x" * 2001), "turns")],
)
async def test_counting_names_its_own_fields(decoder: Decoder, part: pb.Part, field: str) -> None:
    request = pb.CountTokensRequest(turns=[pb.Turn(role=pb.ROLE_USER, parts=[part])])
    assert (await failure_of(decoder.stub.CountTokens(request, timeout=SECONDS))).field == field


async def test_counting_names_the_role_that_is_wrong(decoder: Decoder) -> None:
    request = pb.CountTokensRequest(turns=[pb.Turn(role=pb.ROLE_ASSISTANT, parts=[pb.Part(text="x")])])
    failure = await failure_of(decoder.stub.CountTokens(request, timeout=SECONDS))
    assert (failure.code, failure.field) == ("INVALID_ARGUMENT", "turns[0].role")
