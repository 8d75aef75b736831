"""The decoder's contract over real gRPC, with a scripted engine and real prompts."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.prompt import PromptBuilder
from decoder_service.service import DecoderService
from decoder_service.servicer import DecoderServicer
from decoder_service.task import TaskLimits
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import QueueFull
from shared.features.codec import FeatureCodec
from shared.features.grid import Grid
from shared.features.key import FeatureKey, tenant_tag
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as pb
from shared.pb.lenspair.decoder.v1 import decoder_pb2_grpc
from shared.rpc.server import RpcServer
from shared.store.memory import MemoryFeatureStore
from tests.decoder_fakes import ScriptedEngine
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_bundle, make_key
from tests.rpc.servers import Failure, eventually, failure_of, settings

FINGERPRINT = "f" * 64
KEY = make_key("a", tenant="0")
SECONDS = 20


@dataclass(frozen=True, slots=True)
class Decoder:
    """A served decoder with its parts."""

    stub: Any
    engine: ScriptedEngine
    store: MemoryFeatureStore
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture
async def decoder(prompts: PromptBuilder) -> AsyncIterator[Decoder]:
    codec = FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=4096, store_key=None)
    store = MemoryFeatureStore(codec, ttl_seconds=60)
    engine = ScriptedEngine()
    service = DecoderService(
        FeatureReader(store, FeatureShape(FINGERPRINT, HIDDEN_SIZE, LEVELS)),
        prompts,
        engine,
        TaskLimits(
            max_output_tokens=64, default_output_tokens=16, max_prompt_characters=2000, vocab_size=960
        ),
        ByteBudget(1024 * 1024, max_waiting=8),
        model_name="scripted",
    )
    servicer = DecoderServicer()
    servicer.use(service)
    server = RpcServer(settings(), ["lenspair.decoder.v1.DecoderService"])
    server.add(partial(decoder_pb2_grpc.add_DecoderServiceServicer_to_server, servicer))
    port = await server.start()
    await server.set_serving()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        tokenizer = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
        yield Decoder(decoder_pb2_grpc.DecoderServiceStub(channel), engine, store, tokenizer)
    await server.drain(notice_seconds=0, grace_seconds=0)


def _own_key(name: str = "a") -> FeatureKey:
    return FeatureKey(tenant_tag(""), "1" * 64, name * 64)


def _task(*parts: pb.Part, **fields: Any) -> pb.GenerationTask:
    turn = pb.Turn(role=pb.ROLE_USER, parts=parts or [pb.Part(text="What is this?")])
    return pb.GenerationTask(turns=[turn], **fields)


def _script(decoder: Decoder, text: str) -> tuple[int, ...]:
    """The tokens of a text."""
    return tuple(decoder.tokenizer.encode(text, add_special_tokens=False).ids)


async def _generate(decoder: Decoder, task: pb.GenerationTask) -> pb.GenerateResponse:
    response: pb.GenerateResponse = await decoder.stub.Generate(
        pb.GenerateRequest(task=task), timeout=SECONDS
    )
    return response


async def _stream(decoder: Decoder, task: pb.GenerationTask) -> list[pb.StreamGenerateResponse]:
    call = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=task), timeout=SECONDS)
    return [message async for message in call]


async def _refused(decoder: Decoder, task: pb.GenerationTask) -> Failure:
    """What a task is refused with; the same for both calls."""
    unary = await failure_of(decoder.stub.Generate(pb.GenerateRequest(task=task), timeout=SECONDS))
    streamed = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=task), timeout=SECONDS)
    assert await failure_of(streamed) == unary
    return unary


async def test_text_is_answered_without_the_store(decoder: Decoder) -> None:
    decoder.engine.script = _script(decoder, "a red circle")
    response = await _generate(decoder, _task())
    assert response.text == "a red circle"
    assert response.summary.finish_reason == pb.FINISH_REASON_STOP
    assert response.summary.output_tokens == len(decoder.engine.script)
    assert not response.token_ids
    assert not response.logprobs


async def test_a_picture_is_bound_to_its_place(decoder: Decoder) -> None:
    bundle = make_bundle(grid=Grid(1, 8, 8))
    await decoder.store.put(_own_key(), bundle)
    decoder.engine.script = _script(decoder, "red")
    task = _task(pb.Part(feature_key=str(_own_key())), pb.Part(text="What is this?"))
    response = await _generate(decoder, task)
    assert response.summary.visual_tokens == 16
    [request] = decoder.engine.requests
    [[(start, count)]] = request.prompt.visual_spans
    assert count == 16
    assert len(set(request.prompt.token_ids[start : start + count])) == 1


async def test_a_stream_is_deltas_and_one_summary(decoder: Decoder) -> None:
    text = "삼겹살 👩‍👩‍👧 世界"
    decoder.engine.script = _script(decoder, text)
    messages = await _stream(decoder, _task(return_token_ids=True, top_logprobs=1))
    *deltas, last = messages
    assert last.HasField("summary")
    assert all(message.HasField("delta") for message in deltas)
    assert "".join(message.delta.text for message in deltas) == text
    assert tuple(token for message in deltas for token in message.delta.token_ids) == decoder.engine.script
    assert all(len(message.delta.logprobs) == len(message.delta.token_ids) for message in deltas)


async def test_a_resumed_stream_repeats_nothing(decoder: Decoder) -> None:
    text = "삼겹살 and 世界"
    decoder.engine.script = _script(decoder, text)
    whole = [message.delta for message in await _stream(decoder, _task(return_token_ids=True))]
    for received in range(len(decoder.engine.script)):
        before = "".join(delta.text for delta in whole[:received])
        task = _task(continuation_token_ids=decoder.engine.script[:received])
        rest = await _stream(decoder, task)
        assert before + "".join(message.delta.text for message in rest) == text
        assert rest[-1].summary.output_tokens == len(decoder.engine.script)


async def test_a_stop_sequence_across_tokens(decoder: Decoder) -> None:
    decoder.engine.script = _script(decoder, "alpha beta gamma delta")
    response = await _generate(decoder, _task(stop_sequences=["beta gamma"]))
    assert response.text == "alpha "
    assert response.summary.finish_reason == pb.FINISH_REASON_STOP
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_every_missing_feature_is_named(decoder: Decoder) -> None:
    keys = [str(_own_key(name)) for name in "bc"]
    failure = await _refused(decoder, _task(*(pb.Part(feature_key=key) for key in keys)))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")
    assert failure.message.startswith("2 of")
    assert not decoder.engine.requests


async def test_another_tenants_feature_is_like_a_missing_one(decoder: Decoder) -> None:
    await decoder.store.put(KEY, make_bundle())
    failure = await _refused(decoder, _task(pb.Part(feature_key=str(KEY))))
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
        (_task(pb.Part()), "INVALID_REQUEST", "task.turns[0].parts[0]"),
        (
            _task(pb.Part(text="x"), pb.Part(feature_key="a\r\nb")),
            "MALFORMED_FEATURE_KEY",
            "task.turns[0].parts[1].feature_key",
        ),
        (_task(sampling=pb.SamplingParams(temperature=11)), "INVALID_SAMPLING", "task.sampling.temperature"),
        (_task(sampling=pb.SamplingParams(top_p=float("nan"))), "INVALID_SAMPLING", "task.sampling.top_p"),
        (_task(max_output_tokens=0), "INVALID_REQUEST", "task.max_output_tokens"),
        (_task(max_output_tokens=2**31 - 1), "INVALID_REQUEST", "task.max_output_tokens"),
        (_task(pb.Part(text="x" * 2001)), "PROMPT_TOO_LONG", "task.turns"),
        (_task(pb.Part(text="é1" * 500)), "PROMPT_TOO_LONG", "task.turns"),
    ],
)
async def test_bad_requests_name_their_field(
    decoder: Decoder, task: pb.GenerationTask, reason: str, field: str
) -> None:
    failure = await _refused(decoder, task)
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", reason, field)
    assert not decoder.engine.requests


async def test_a_full_queue_says_when_to_come_back(decoder: Decoder) -> None:
    decoder.engine.error = QueueFull("64 requests wait already", retry_after_seconds=1.5)
    failure = await _refused(decoder, _task())
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


async def test_explicit_zero_is_not_unset(decoder: Decoder) -> None:
    await _generate(decoder, _task(sampling=pb.SamplingParams(temperature=0, top_p=0)))
    await _generate(decoder, _task())
    explicit, unset = (request.sampling for request in decoder.engine.requests)
    assert (explicit.temperature, explicit.top_p) == (0.0, 0.0)
    assert (unset.temperature, unset.top_p) == (0.0, 1.0)


async def test_a_cancelled_stream_leaves_the_engine(decoder: Decoder) -> None:
    decoder.engine.script = _script(decoder, "one two three four five six")
    call = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=_task()), timeout=SECONDS)
    await call.read()
    decoder.engine.gate.clear()
    call.cancel()
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_a_deadline_ends_the_work(decoder: Decoder) -> None:
    decoder.engine.script = _script(decoder, "one two")
    decoder.engine.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.stub.Generate(pb.GenerateRequest(task=_task()), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: decoder.engine.abandoned == 1)


async def test_tokens_are_counted_without_the_engine(decoder: Decoder) -> None:
    await decoder.store.put(_own_key(), make_bundle())
    parts = [pb.Part(feature_key=str(_own_key())), pb.Part(text="What is this?")]
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
