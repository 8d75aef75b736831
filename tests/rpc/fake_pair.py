"""An encoder and a decoder without models; they do what the contracts say, and fail where tests want it."""

# ruff: noqa: N802  the methods have the contracts' names

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_status import rpc_status

from lenspair_client.options import DECODER_SERVICE, ENCODER_SERVICE
from shared.errors import Draining, FeatureNotFound, InvalidMedia, LenspairError
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as decoder
from shared.pb.lenspair.decoder.v1.decoder_pb2_grpc import (
    DecoderServiceServicer,
    add_DecoderServiceServicer_to_server,
)
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as encoder
from shared.pb.lenspair.encoder.v1.encoder_pb2_grpc import (
    EncoderServiceServicer,
    add_EncoderServiceServicer_to_server,
)
from shared.rpc.status import status_of

MIB = 1024 * 1024


FAR = Timestamp(seconds=4_000_000_000)
DESCRIPTION = encoder.FeatureDescription(
    feature=encoder.FeatureRef(expire_time=FAR),
    create_time=Timestamp(seconds=1_000_000_000),
    dtype="bfloat16",
    hidden_size=24,
    deepstack_levels=3,
    chunk_count=4,
    fingerprint="f" * 64,
)


def key_of(data: bytes) -> str:
    return f"key-{hashlib.sha256(data).hexdigest()}"


def fail(context: grpc.ServicerContext, error: LenspairError) -> None:
    context.abort_with_status(rpc_status.to_status(status_of(error)))


@dataclass
class FakeEncoder(EncoderServiceServicer):
    """Keeps keys in `store`, which is what the decoder sees. `errors` are raised first, one a call."""

    store: set[str] = field(default_factory=set)
    errors: deque[LenspairError] = field(default_factory=deque)
    calls: list[str] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    settings: list[encoder.MediaSettings] = field(default_factory=list)
    times_to_live: list[float] = field(default_factory=list)
    stats: encoder.GetStoreStatsResponse = field(default_factory=encoder.GetStoreStatsResponse)
    # When set, so many Encode calls must run at one time before any is answered.
    together: threading.Barrier | None = None
    # This picture is no picture; Encode calls of that one hang until their callers give them up.
    refused: bytes | None = None
    hanging: bytes | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    def Encode(self, request: encoder.EncodeRequest, context: grpc.ServicerContext) -> encoder.EncodeResponse:
        self._begin("Encode", context)
        self.settings.append(request.settings)
        if self.together is not None:
            self.together.wait(timeout=10)
        if request.media.data == self.refused:
            fail(context, InvalidMedia("no picture", field="media.data"))
        if request.media.data == self.hanging:
            is_over = threading.Event()
            context.add_callback(is_over.set)
            if is_over.wait(timeout=10):
                self.given_up.set()
        feature, outcome = self._feature(key_of(request.media.data))
        return encoder.EncodeResponse(feature=feature, outcome=outcome)

    def StreamEncode(
        self, requests: Iterator[encoder.StreamEncodeRequest], context: grpc.ServicerContext
    ) -> encoder.StreamEncodeResponse:
        header = next(requests).header
        chunks = [request.chunk for request in requests]
        self._begin("StreamEncode", context)
        self.chunk_sizes = [len(chunk) for chunk in chunks]
        assert header.size_bytes == sum(self.chunk_sizes)
        feature, outcome = self._feature(key_of(b"".join(chunks)))
        return encoder.StreamEncodeResponse(feature=feature, outcome=outcome)

    def LookupFeatures(
        self, request: encoder.LookupFeaturesRequest, context: grpc.ServicerContext
    ) -> encoder.LookupFeaturesResponse:
        self._begin("LookupFeatures", context)
        response = encoder.LookupFeaturesResponse()
        for query in request.queries:
            key = f"key-{query.sha256.hex()}"
            result = response.results.add()
            if key in self.store:
                result.feature.CopyFrom(self._feature(key)[0])
        return response

    def FetchFeatures(
        self, request: encoder.FetchFeaturesRequest, context: grpc.ServicerContext
    ) -> Iterator[encoder.FetchFeaturesResponse]:
        raise NotImplementedError

    def KeepAlive(
        self, request: encoder.KeepAliveRequest, context: grpc.ServicerContext
    ) -> encoder.KeepAliveResponse:
        self._begin("KeepAlive", context)
        self.times_to_live.append(request.time_to_live.ToTimedelta().total_seconds())
        times = [FAR if key in self.store else None for key in request.keys]
        results = [encoder.KeepAliveResult(expire_time=time) for time in times]
        return encoder.KeepAliveResponse(results=results)

    def Evict(self, request: encoder.EvictRequest, context: grpc.ServicerContext) -> encoder.EvictResponse:
        self._begin("Evict", context)
        existed = [key in self.store for key in request.keys]
        self.store.difference_update(request.keys)
        return encoder.EvictResponse(
            results=[encoder.EvictResult(existed=was_there) for was_there in existed]
        )

    def DescribeFeatures(
        self, request: encoder.DescribeFeaturesRequest, context: grpc.ServicerContext
    ) -> encoder.DescribeFeaturesResponse:
        self._begin("DescribeFeatures", context)
        response = encoder.DescribeFeaturesResponse()
        for key in request.keys:
            result = response.results.add()
            if key in self.store:
                result.description.feature.CopyFrom(self._feature(key)[0])
                result.description.MergeFrom(DESCRIPTION)
        return response

    def GetStoreStats(
        self, request: encoder.GetStoreStatsRequest, context: grpc.ServicerContext
    ) -> encoder.GetStoreStatsResponse:
        self._begin("GetStoreStats", context)
        return self.stats

    def _begin(self, method: str, context: grpc.ServicerContext) -> None:
        self.calls.append(method)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.errors:
            fail(context, self.errors.popleft())

    def _feature(self, key: str) -> tuple[encoder.FeatureRef, encoder.Outcome.ValueType]:
        outcome = encoder.OUTCOME_HIT if key in self.store else encoder.OUTCOME_ENCODED
        self.store.add(key)
        grid = encoder.GridThw(t=1, h=8, w=16)
        return encoder.FeatureRef(key=key, grid_thw=grid, token_count=32, size_bytes=4096), outcome


@dataclass
class FakeDecoder(DecoderServiceServicer):
    """Answers with `pieces`: one token each, ids from 100 on, a text that may be empty or lag behind.

    `errors` are raised first, one a call; `deaths` says after how many pieces a stream breaks, one a call.
    """

    store: set[str]
    pieces: Sequence[str] = ("a ", "red ", "", "cir\u00dfle")
    errors: deque[LenspairError] = field(default_factory=deque)
    deaths: deque[int] = field(default_factory=deque)
    tasks: list[decoder.GenerationTask] = field(default_factory=list)
    remaining: list[float] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    sends_summary: bool = True
    hangs_after: int | None = None

    def Generate(
        self, request: decoder.GenerateRequest, context: grpc.ServicerContext
    ) -> decoder.GenerateResponse:
        self._begin(request.task, context)
        rest = range(len(request.task.continuation_token_ids), len(self.pieces))
        return decoder.GenerateResponse(
            text="".join(self.pieces[number] for number in rest),
            token_ids=[100 + number for number in rest] if request.task.return_token_ids else [],
            summary=self._summary(),
            further_samples=[
                decoder.Sample(sample_index=index, text="another")
                for index in range(1, request.task.sample_count)
            ],
        )

    def StreamGenerate(
        self, request: decoder.StreamGenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[decoder.StreamGenerateResponse]:
        context.add_callback(self.cancelled.set)
        self._begin(request.task, context)
        lifetime = self.deaths.popleft() if self.deaths else len(self.pieces) + 1
        received = len(request.task.continuation_token_ids)
        for number in range(received, len(self.pieces)):
            if number - received == lifetime:
                fail(context, Draining("this decoder dies"))
            if self.hangs_after == number:
                self.cancelled.wait(timeout=10)
                return
            token_ids = [100 + number] if request.task.return_token_ids else []
            yield decoder.StreamGenerateResponse(
                delta=decoder.Delta(text=self.pieces[number], token_ids=token_ids)
            )
        if len(self.pieces) - received == lifetime:
            fail(context, Draining("this decoder dies"))
        if self.sends_summary:
            yield decoder.StreamGenerateResponse(summary=self._summary())

    def CountTokens(
        self, request: decoder.CountTokensRequest, context: grpc.ServicerContext
    ) -> decoder.CountTokensResponse:
        self._begin(decoder.GenerationTask(turns=request.turns), context)
        return decoder.CountTokensResponse(input_tokens=50, visual_tokens=32, context_tokens=4096)

    def _begin(self, task: decoder.GenerationTask, context: grpc.ServicerContext) -> None:
        self.tasks.append(task)
        self.remaining.append(context.time_remaining() or 0.0)
        if self.errors:
            fail(context, self.errors.popleft())
        keys = [part.feature_key for turn in task.turns for part in turn.parts if part.feature_key]
        missing = [key for key in keys if key not in self.store]
        if missing:
            fail(context, FeatureNotFound(missing))

    def _summary(self) -> decoder.Summary:
        return decoder.Summary(
            finish_reason=decoder.FINISH_REASON_STOP,
            input_tokens=40,
            visual_tokens=32,
            output_tokens=len(self.pieces),
        )


@dataclass(frozen=True, slots=True)
class FakePair:
    """An encoder and decoders behind one address each."""

    encoder: FakeEncoder
    decoder: FakeDecoder
    encoder_address: str
    decoder_address: str
    # Of each decoder, in the order of their addresses.
    decoder_health: list[HealthServicer]


@contextmanager
def fake_pair(*, num_decoders: int = 1) -> Iterator[FakePair]:
    """Serves a pair from threads; several decoders are one servicer under several addresses."""
    store: set[str] = set()
    encoder_servicer, decoder_servicer = FakeEncoder(store), FakeDecoder(store)
    with ExitStack() as servers:
        port, _ = servers.enter_context(_serving(encoder_servicer, add_EncoderServiceServicer_to_server))
        decoders = [
            servers.enter_context(_serving(decoder_servicer, add_DecoderServiceServicer_to_server))
            for _ in range(num_decoders)
        ]
        addresses = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port, _ in decoders)
        health = [health for _, health in decoders]
        yield FakePair(encoder_servicer, decoder_servicer, f"127.0.0.1:{port}", addresses, health)


@contextmanager
def _serving(servicer: Any, register: Any) -> Iterator[tuple[int, HealthServicer]]:
    options = [
        ("grpc.max_receive_message_length", 64 * MIB),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ]
    server = grpc.server(ThreadPoolExecutor(16), options=options)
    register(servicer, server)
    health = HealthServicer()
    for service in (ENCODER_SERVICE, DECODER_SERVICE):
        health.set(service, HealthCheckResponse.SERVING)
    add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port, health
    finally:
        server.stop(grace=None).wait()
