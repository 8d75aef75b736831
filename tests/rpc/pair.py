"""Both services over gRPC on one store: the encoder with a fake tower, the decoder with a scripted engine."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
from google.rpc import status_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_status import rpc_status

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.prompt import PromptBuilder
from decoder_service.service import DecoderService
from decoder_service.servicer import DecoderServicer
from decoder_service.task import TaskLimits
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.servicer import EncoderServicer
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from shared.rpc.server import RpcServer
from shared.store.memory import MemoryValue
from shared.store.process_cache import CachedFeatureStore
from tests.decoder_fakes import ScriptedEngine, demo_grammars
from tests.fakes import HIDDEN, LEVELS, FakeTower
from tests.rpc.servers import settings
from tests.unit.encoder.harness import FINGERPRINT, a_store, an_encoder

SECONDS = 20
TASK_LIMITS = TaskLimits(
    max_output_tokens=64, default_output_tokens=16, max_prompt_characters=2000, vocab_size=960
)
METHODS = ("Generate", "StreamGenerate", "CountTokens")


@dataclass(frozen=True, slots=True)
class ServedPair:
    """The pair, its parts, and calls of it in the name of a tenant (None: in nobody's)."""

    encoder: Any
    decoder: Any
    tower: FakeTower
    engine: ScriptedEngine
    values: dict[str, MemoryValue]

    def encode(self, data: bytes, tenant: str | None = None) -> Any:
        media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_IMAGE, data=data)
        request = encoder_pb2.EncodeRequest(media=media)
        return self.encoder.Encode(request, timeout=SECONDS, metadata=named(tenant))

    def look_up(self, sha256: bytes, tenant: str | None = None) -> Any:
        query = encoder_pb2.FeatureQuery(modality=encoder_pb2.MODALITY_IMAGE, sha256=sha256)
        request = encoder_pb2.LookupFeaturesRequest(queries=[query])
        return self.encoder.LookupFeatures(request, timeout=SECONDS, metadata=named(tenant))

    async def ask(self, method: str, *keys: str, tenant: str | None = None) -> None:
        """Asks the decoder about features, by any of its methods."""
        parts = [decoder_pb2.Part(feature_key=key) for key in keys]
        turns = [decoder_pb2.Turn(role=decoder_pb2.ROLE_USER, parts=parts)]
        task = decoder_pb2.GenerationTask(turns=turns)
        options = {"timeout": SECONDS, "metadata": named(tenant)}
        match method:
            case "Generate":
                await self.decoder.Generate(decoder_pb2.GenerateRequest(task=task), **options)
            case "StreamGenerate":
                request = decoder_pb2.StreamGenerateRequest(task=task)
                assert [message async for message in self.decoder.StreamGenerate(request, **options)]
            case "CountTokens":
                await self.decoder.CountTokens(decoder_pb2.CountTokensRequest(turns=turns), **options)

    async def refused(self, method: str, *keys: str, tenant: str | None = None) -> status_pb2.Status:
        """The status with which a question is refused."""
        return await status_of(self.ask(method, *keys, tenant=tenant))


def named(tenant: str | None) -> tuple[tuple[str, str], ...]:
    return () if tenant is None else (("x-tenant", tenant),)


async def status_of(call: Any) -> status_pb2.Status:
    """What a caller gets of a call that must fail, every byte of it."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has all that is read
        assert status is not None
        return status
    raise AssertionError("the call was answered")


@asynccontextmanager
async def a_pair(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, **values: Any
) -> AsyncIterator[ServedPair]:
    """Serves the pair; `values` are settings of both services."""
    values = {"tenant_metadata": "x-tenant", **values}
    store, engine = a_store(), ScriptedEngine()
    async with an_encoder(preprocessor, store=store) as encoder:
        encoder_servicer, decoder_servicer = EncoderServicer(), DecoderServicer()
        encoder_servicer.use(encoder.service, encoder.stored)
        decoder_servicer.use(a_decoder(store.values, prompts, engine))
        encoder_face = partial(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, encoder_servicer)
        decoder_face = partial(decoder_pb2_grpc.add_DecoderServiceServicer_to_server, decoder_servicer)
        async with _serving(encoder_face, values) as one, _serving(decoder_face, values) as other:
            yield ServedPair(
                encoder_pb2_grpc.EncoderServiceStub(one),
                decoder_pb2_grpc.DecoderServiceStub(other),
                encoder.tower,
                engine,
                store.values,
            )


def a_decoder(
    values: dict[str, MemoryValue], prompts: PromptBuilder, engine: ScriptedEngine
) -> DecoderService:
    store = CachedFeatureStore(a_store(values), max_bytes=1024**2, max_entries=100)
    return DecoderService(
        FeatureReader(store, FeatureShape(FINGERPRINT, HIDDEN, LEVELS)),
        prompts,
        engine,
        TASK_LIMITS,
        ByteBudget(1024**2, max_waiting=8),
        grammars=demo_grammars(),
        model_name="scripted",
    )


@asynccontextmanager
async def _serving(
    register: Callable[[grpc.aio.Server], None], values: dict[str, Any]
) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer(settings(**values), ["test"])
    server.add(register)
    port = await server.start()
    await server.set_serving()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.drain(notice_seconds=0, grace_seconds=0)
