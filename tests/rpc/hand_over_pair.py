"""An encoder and a decoder over real gRPC that may hand features over, and peers in place of the encoder."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio

from decoder_service.allowed_sources import AllowedSources
from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.hand_over import HandedOverFeatures
from decoder_service.prompt import PromptBuilder
from decoder_service.service import DecoderService
from decoder_service.servicer import DecoderServicer
from decoder_service.task import TaskLimits
from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.servicer import EncoderServicer
from shared.features.codec import FeatureCodec
from shared.features.source import Address, SourceSeal
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from shared.rpc.channel import open_channel
from shared.rpc.feature_source import FeatureCalls
from shared.rpc.server import RpcServer
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore
from tests.decoder_fakes import ScriptedEngine, demo_grammars
from tests.fakes import HIDDEN, LEVELS
from tests.rpc.servers import settings
from tests.unit.encoder.harness import Harness, an_encoder

FINGERPRINT = "f" * 64
STORE_KEY = b"a store key"
CHUNK_BYTES = 4096
TIMEOUT_SECONDS = 1.0
SEAL = SourceSeal(STORE_KEY)
LOOPBACK = "127.0.0.0/8"

Dial = Callable[[Address], grpc.aio.Channel]


def a_codec(store_key: bytes = STORE_KEY, *, chunk_bytes: int = CHUNK_BYTES) -> FeatureCodec:
    return FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=chunk_bytes, store_key=store_key)


def redis_store(url: str) -> FeatureStore:
    """The store as a service opens it."""
    return open_feature_store(
        url=url,
        fingerprint=FINGERPRINT,
        ttl_seconds=60,
        timeout_seconds=TIMEOUT_SECONDS,
        connections=2,
        chunk_bytes=CHUNK_BYTES,
        store_key=STORE_KEY,
    )


@dataclass(frozen=True, slots=True)
class Encoder:
    """A served encoder with a fake tower."""

    stub: Any
    harness: Harness
    address: Address


@dataclass(frozen=True, slots=True)
class Decoder:
    """A served decoder with a scripted engine; `dials` lists the addresses that it opened channels to."""

    stub: Any
    engine: ScriptedEngine
    dials: list[Address] = field(default_factory=list)


@asynccontextmanager
async def served_encoder(preprocessor: ImagePreprocessor, store: FeatureStore) -> AsyncIterator[Encoder]:
    servicer = EncoderServicer()
    server = RpcServer(settings(tenant_metadata="x-tenant"), ["lenspair.encoder.v1.EncoderService"])
    server.add(partial(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, servicer))
    address = Address("127.0.0.1", await server.start())
    memory = HandOverMemory(limit_bytes=1024**2, seconds=60)
    hand_over = HandOver(a_codec(), memory, partial(SEAL.close, address))
    async with an_encoder(preprocessor, store=store, hand_over=hand_over) as harness:
        servicer.use(harness.service, harness.stored)
        await server.set_serving()
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield Encoder(encoder_pb2_grpc.EncoderServiceStub(channel), harness, address)
        await server.drain(notice_seconds=0, grace_seconds=0)


@asynccontextmanager
async def served_decoder(
    prompts: PromptBuilder,
    store: FeatureStore,
    *,
    allowed: str = LOOPBACK,
    shape: FeatureShape | None = None,
    dial: Dial = open_channel,
    max_idle: int = 16,
) -> AsyncIterator[Decoder]:
    dials: list[Address] = []

    def recorded(address: Address) -> grpc.aio.Channel:
        dials.append(address)
        return dial(address)

    calls = FeatureCalls(open_channel=recorded, max_idle=max_idle)
    sources = HandedOverFeatures(
        a_codec(), SEAL, AllowedSources.parse(allowed), calls, timeout_seconds=TIMEOUT_SECONDS
    )
    engine = ScriptedEngine()
    service = DecoderService(
        FeatureReader(store, shape or FeatureShape(FINGERPRINT, HIDDEN, LEVELS), sources),
        prompts,
        engine,
        TaskLimits(
            max_output_tokens=64, default_output_tokens=16, max_prompt_characters=2000, vocab_size=960
        ),
        ByteBudget(64 * 1024**2, max_waiting=8),
        grammars=demo_grammars(),
        model_name="scripted",
    )
    servicer = DecoderServicer()
    servicer.use(service)
    server = RpcServer(settings(tenant_metadata="x-tenant"), ["lenspair.decoder.v1.DecoderService"])
    server.add(partial(decoder_pb2_grpc.add_DecoderServiceServicer_to_server, servicer))
    port = await server.start()
    await server.set_serving()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Decoder(decoder_pb2_grpc.DecoderServiceStub(channel), engine, dials)
    await server.drain(notice_seconds=0, grace_seconds=0)
    await calls.close()


class Peer:
    """An encoder that answers FetchFeatures with whatever `answer` yields."""

    def __init__(self) -> None:
        self.answer: Callable[[encoder_pb2.FetchFeaturesRequest], AsyncIterator[Any]] = _nothing
        self.metadata: list[dict[str, str | bytes]] = []
        self.requests: list[encoder_pb2.FetchFeaturesRequest] = []

    async def FetchFeatures(  # noqa: N802
        self, request: encoder_pb2.FetchFeaturesRequest, context: Any
    ) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        async for response in self.answer(request):
            yield response


@asynccontextmanager
async def served_peer(peer: Peer, *, host: str = "127.0.0.1") -> AsyncIterator[Address]:
    """A plain server: nothing of ours stands between the peer and the decoder.

    It sends messages and bytes alike, so that a peer can say what is no message.
    """
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.unary_stream_rpc_method_handler(
        peer.FetchFeatures,
        request_deserializer=encoder_pb2.FetchFeaturesRequest.FromString,
        response_serializer=lambda said: said if isinstance(said, bytes) else said.SerializeToString(),
    )
    service = "lenspair.encoder.v1.EncoderService"
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"FetchFeatures": handler})]
    )
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    try:
        yield Address(host, port)
    finally:
        await server.stop(grace=None)


def question(key: object, source: str = "") -> decoder_pb2.GenerationTask:
    parts = [
        decoder_pb2.Part(feature_key=str(key), feature_source=source),
        decoder_pb2.Part(text="What is this?"),
    ]
    return task(parts)


def task(parts: Sequence[decoder_pb2.Part]) -> decoder_pb2.GenerationTask:
    return decoder_pb2.GenerationTask(turns=[decoder_pb2.Turn(role=decoder_pb2.ROLE_USER, parts=parts)])


async def _nothing(_request: encoder_pb2.FetchFeaturesRequest) -> AsyncIterator[Any]:
    return
    yield
