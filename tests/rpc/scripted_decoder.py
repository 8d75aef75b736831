"""A decoder whose engine follows a script, over real gRPC with real prompts, and how tests ask it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from tokenizers import Tokenizer

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.prompt import PromptBuilder
from decoder_service.service import DecoderService
from decoder_service.servicer import DecoderServicer
from decoder_service.task import TaskLimits
from demo.pair import DEMO_CHECKPOINT
from shared.features.codec import FeatureCodec
from shared.features.key import FeatureKey, tenant_tag
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as pb
from shared.pb.lenspair.decoder.v1 import decoder_pb2_grpc
from shared.rpc.server import RpcServer
from shared.store.memory import MemoryFeatureStore
from tests.decoder_fakes import ScriptedEngine, demo_grammars
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_key
from tests.rpc.servers import Failure, failure_of, settings

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


@asynccontextmanager
async def scripted_decoder(prompts: PromptBuilder) -> AsyncIterator[Decoder]:
    """A decoder on a free port whose engine says what it is told to."""
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
        grammars=demo_grammars(),
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


def own_key(name: str = "a") -> FeatureKey:
    return FeatureKey(tenant_tag(""), "1" * 64, name * 64)


def task_of(*parts: pb.Part, **fields: Any) -> pb.GenerationTask:
    turn = pb.Turn(role=pb.ROLE_USER, parts=parts or [pb.Part(text="What is this?")])
    return pb.GenerationTask(turns=[turn], **fields)


def script(decoder: Decoder, text: str) -> tuple[int, ...]:
    """The tokens of a text."""
    return tuple(decoder.tokenizer.encode(text, add_special_tokens=False).ids)


async def generate(decoder: Decoder, task: pb.GenerationTask) -> pb.GenerateResponse:
    response: pb.GenerateResponse = await decoder.stub.Generate(
        pb.GenerateRequest(task=task), timeout=SECONDS
    )
    return response


async def stream(decoder: Decoder, task: pb.GenerationTask) -> list[pb.StreamGenerateResponse]:
    call = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=task), timeout=SECONDS)
    return [message async for message in call]


async def refused(decoder: Decoder, task: pb.GenerationTask) -> Failure:
    """What a task is refused with; the same for both calls."""
    unary = await failure_of(decoder.stub.Generate(pb.GenerateRequest(task=task), timeout=SECONDS))
    streamed = decoder.stub.StreamGenerate(pb.StreamGenerateRequest(task=task), timeout=SECONDS)
    assert await failure_of(streamed) == unary
    return unary
