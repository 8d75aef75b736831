"""lenspair.encoder.v1 over a real server: what callers send, and what they get to see."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from PIL import Image

from encoder_service.media import MediaLimits
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.servicer import EncoderServicer
from encoder_service.settings import EncoderSettings
from shared.features.key import FeatureKey
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.pb.lenspair.encoder.v1 import encoder_pb2_grpc as pb_grpc
from shared.rpc.server import RpcServer
from shared.store.memory_leases import LeaseTable, MemoryFeatureLeases
from shared.store.store import FeatureStore
from tests.unit.encoder.harness import Harness, a_store, an_encoder, picture
from tests.unit.encoder.samples import LIMITS, declared_png, encoded, noise, solid

SECONDS = 20.0
SERVICE_NAME = "lenspair.encoder.v1.EncoderService"


@dataclass(frozen=True, slots=True)
class Server:
    stub: Any
    health: Any
    encoder: Harness


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a caller sees of an error."""

    code: grpc.StatusCode
    reason: str
    field: str
    message: str
    metadata: dict[str, str]
    retry_seconds: float | None


@pytest.fixture(scope="module")
def preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


@asynccontextmanager
async def serving(
    preprocessor: ImagePreprocessor,
    *,
    limits: MediaLimits = LIMITS,
    max_queue_items: int = 64,
    store: FeatureStore | None = None,
) -> AsyncIterator[Server]:
    settings = EncoderSettings(
        checkpoint="unused",
        store_url="redis://unused",  # type: ignore[arg-type]  # pydantic makes it a secret
        listen="127.0.0.1:0",
        tenant_metadata="x-tenant",
    )
    async with an_encoder(
        preprocessor, store=store, limits=limits, max_queue_items=max_queue_items
    ) as encoder:
        servicer = EncoderServicer()
        servicer.use(encoder.service, encoder.stored)
        server = RpcServer(settings, [SERVICE_NAME])
        server.add(partial(pb_grpc.add_EncoderServiceServicer_to_server, servicer))
        port = await server.start()
        await server.set_serving()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Server(pb_grpc.EncoderServiceStub(channel), health_pb2_grpc.HealthStub(channel), encoder)
        await server.drain(notice_seconds=0, grace_seconds=0)


@pytest.fixture
async def server(preprocessor: ImagePreprocessor) -> AsyncIterator[Server]:
    async with serving(preprocessor) as running:
        yield running


def image(data: bytes, **settings: Any) -> pb.EncodeRequest:
    media = pb.Media(modality=pb.MODALITY_IMAGE, data=data)
    return pb.EncodeRequest(media=media, settings=pb.MediaSettings(**settings))


def stream(data: bytes, *, declared: int | None = None, chunk_bytes: int = 1000) -> Iterator[Any]:
    size = len(data) if declared is None else declared
    yield pb.StreamEncodeRequest(header=pb.StreamEncodeHeader(modality=pb.MODALITY_IMAGE, size_bytes=size))
    for start in range(0, len(data), chunk_bytes):
        yield pb.StreamEncodeRequest(chunk=data[start : start + chunk_bytes])


async def refusal(call: Any) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]  # it has all that is read
    assert status is not None
    infos, retries = [], []
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        infos += [info] if detail.Unpack(info) else []
        retries += [retry.retry_delay.ToTimedelta().total_seconds()] if detail.Unpack(retry) else []
    (info,) = infos
    metadata = dict(info.metadata)
    return Refusal(
        caught.value.code(),
        info.reason,
        metadata.get("field", ""),
        status.message,
        metadata,
        retries[0] if retries else None,
    )


async def is_healthy(server: Server) -> bool:
    """The next good picture is served, and nothing of a bad one was stored."""
    nothing_stored = not server.encoder.store.values
    answer = await server.stub.Encode(image(solid("red")), timeout=SECONDS)
    return nothing_stored and answer.outcome == pb.OUTCOME_ENCODED


async def test_encode_answers_with_a_reference(server: Server) -> None:
    data = encoded(noise(640, 480), "JPEG")
    first = await server.stub.Encode(image(data, max_pixels=50_000), timeout=SECONDS)
    again = await server.stub.Encode(image(data, max_pixels=50_000), timeout=SECONDS)
    assert (first.outcome, again.outcome) == (pb.OUTCOME_ENCODED, pb.OUTCOME_HIT)
    feature = first.feature
    assert FeatureKey.parse(feature.key)
    assert feature.modality == pb.MODALITY_IMAGE
    assert feature.grid_thw.t == 1
    assert feature.token_count == feature.grid_thw.h * feature.grid_thw.w // 4
    assert feature.size_bytes == feature.token_count * 16 * 4
    assert feature.expire_time.ToDatetime(UTC) > datetime.now(UTC)
    assert first.effective_settings == pb.EffectiveMediaSettings(
        min_pixels=4096, max_pixels=50_000, do_resize=True
    )


async def test_without_a_resize_the_effective_settings_hold_no_budget(server: Server) -> None:
    answer = await server.stub.Encode(image(solid("red"), do_resize=False), timeout=SECONDS)
    assert answer.effective_settings == pb.EffectiveMediaSettings(do_resize=False)
    assert not answer.effective_settings.HasField("max_pixels")


async def test_a_stream_gives_the_same_feature(server: Server) -> None:
    data = encoded(noise(200, 200))
    unary = await server.stub.Encode(image(data), timeout=SECONDS)
    streamed = await server.stub.StreamEncode(stream(data), timeout=SECONDS)
    assert streamed.outcome == pb.OUTCOME_HIT
    assert streamed.feature.key == unary.feature.key
    other = await server.stub.StreamEncode(stream(solid("red")), timeout=SECONDS)
    assert other.outcome == pb.OUTCOME_ENCODED


async def test_look_up_needs_no_bytes(server: Server) -> None:
    data = solid("red")
    query = pb.FeatureQuery(modality=pb.MODALITY_IMAGE, sha256=hashlib.sha256(data).digest())
    other = pb.FeatureQuery(modality=pb.MODALITY_IMAGE, sha256=bytes(32))
    request = pb.LookupFeaturesRequest(queries=[query, other])
    before = await server.stub.LookupFeatures(request, timeout=SECONDS)
    made = await server.stub.Encode(image(data), timeout=SECONDS)
    after = await server.stub.LookupFeatures(request, timeout=SECONDS)
    assert [result.HasField("feature") for result in before.results] == [False, False]
    assert [result.HasField("feature") for result in after.results] == [True, False]
    assert after.results[0].feature.key == made.feature.key


# C14
async def test_a_tenant_sees_nothing_of_another(server: Server) -> None:
    data = solid("red")
    query = pb.FeatureQuery(modality=pb.MODALITY_IMAGE, sha256=hashlib.sha256(data).digest())
    mine = (("x-tenant", "mine"),)
    first = await server.stub.Encode(image(data), timeout=SECONDS, metadata=mine)
    theirs = await server.stub.LookupFeatures(pb.LookupFeaturesRequest(queries=[query]), timeout=SECONDS)
    second = await server.stub.Encode(image(data), timeout=SECONDS)
    assert not theirs.results[0].HasField("feature")
    assert second.outcome == pb.OUTCOME_ENCODED
    assert second.feature.key != first.feature.key


BAD_MEDIA = {
    "empty": (b"", "INVALID_MEDIA"),
    "a path": (b"/etc/hostname", "INVALID_MEDIA"),
    "a data URI": (b"data:image/png;base64,AAAA", "INVALID_MEDIA"),
    "cut off": (encoded(noise(), "JPEG")[:-40], "INVALID_MEDIA"),
    "a strip": (encoded(Image.new("RGB", (1093, 5))), "INVALID_MEDIA"),
    "a bomb": (declared_png(20_000, 20_000), "MEDIA_TOO_LARGE"),
    "too many bytes": (bytes(LIMITS.max_bytes + 1), "MEDIA_TOO_LARGE"),
}


@pytest.mark.parametrize("name", BAD_MEDIA)
async def test_bad_media_is_the_callers_fault(server: Server, name: str) -> None:
    data, reason = BAD_MEDIA[name]
    seen = await refusal(server.stub.Encode(image(data), timeout=SECONDS))
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert seen.field == "media.data"
    assert await is_healthy(server)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"min_pixels": 60_000, "max_pixels": 50_000}, "settings.min_pixels"),
    ({"min_pixels": 9_000_000, "max_pixels": 10_000_000}, "settings.max_pixels"),
    ({"max_pixels": 0}, "settings.max_pixels"),
    ({"min_pixels": -5}, "settings.min_pixels"),
    ({"fps": 1.0}, "settings.fps"),
    ({"num_frames": 2}, "settings.num_frames"),
    ({"total_pixels": 5000}, "settings.total_pixels"),
    ({"do_resize": False, "min_pixels": 5000}, "settings.min_pixels"),
]


@pytest.mark.parametrize(("settings", "field"), BAD_SETTINGS)
async def test_bad_settings_name_the_field(server: Server, settings: dict[str, Any], field: str) -> None:
    seen = await refusal(server.stub.Encode(image(solid("red"), **settings), timeout=SECONDS))
    assert (seen.reason, seen.field) == ("INVALID_MEDIA_SETTINGS", field)
    assert await is_healthy(server)


# I14
async def test_reversed_budgets_name_both_values(server: Server) -> None:
    request = image(solid("red", 500, 500), min_pixels=1_000_000, max_pixels=100_000)
    seen = await refusal(server.stub.Encode(request, timeout=SECONDS))
    assert (seen.metadata["min_pixels"], seen.metadata["max_pixels"]) == ("1000000", "100000")


IMAGE = pb.MODALITY_IMAGE
VIDEO = pb.MODALITY_VIDEO


def frame_list(
    *frames: bytes,
    modality: pb.Modality.ValueType,
    fps: float | None = None,
    timestamps: Sequence[float] = (),
) -> pb.EncodeRequest:
    sent = pb.FrameList(frames=frames, fps=fps, timestamps=timestamps)
    return pb.EncodeRequest(media=pb.Media(modality=modality, frames=sent))


BAD_REQUESTS: list[tuple[pb.EncodeRequest, str, str]] = [
    (pb.EncodeRequest(), "INVALID_REQUEST", "media"),
    (pb.EncodeRequest(media=pb.Media(data=b"x")), "INVALID_REQUEST", "media.modality"),
    (pb.EncodeRequest(media=pb.Media(modality=IMAGE)), "INVALID_REQUEST", "media.data"),
    (
        pb.EncodeRequest(media=pb.Media(modality=pb.MODALITY_VIDEO, data=b"x")),
        "INVALID_MEDIA",
        "media.data",
    ),
    (frame_list(modality=VIDEO), "INVALID_REQUEST", "media.frames"),
    (frame_list(b"x", modality=VIDEO), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", modality=VIDEO, fps=1, timestamps=[0]), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", modality=VIDEO, fps=0), "INVALID_REQUEST", "media.frames.fps"),
    (frame_list(b"x", modality=VIDEO, fps=float("nan")), "INVALID_REQUEST", "media.frames.fps"),
    (frame_list(b"x", b"y", modality=VIDEO, timestamps=[0]), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", b"y", modality=VIDEO, timestamps=[1, 0]), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", modality=VIDEO, timestamps=[-1]), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", modality=VIDEO, timestamps=[math.inf]), "INVALID_REQUEST", "media.frames.timestamps"),
    (frame_list(b"x", modality=VIDEO, fps=1), "INVALID_MEDIA", "media.frames[0]"),
    (
        pb.EncodeRequest(media=pb.Media(modality=IMAGE, uri="file:///etc/hostname")),
        "NOT_SUPPORTED",
        "media.uri",
    ),
    (pb.EncodeRequest(media=pb.Media(modality=IMAGE, uri="../x.png")), "NOT_SUPPORTED", "media.uri"),
    (
        frame_list(b"x", modality=IMAGE, fps=1),
        "INVALID_REQUEST",
        "media.frames",
    ),
    (
        pb.EncodeRequest(
            media=pb.Media(modality=IMAGE, data=b"x"), near_match=pb.NearMatchPolicy(tolerance=1)
        ),
        "NOT_SUPPORTED",
        "near_match",
    ),
]


@pytest.mark.parametrize(("request_", "reason", "field"), BAD_REQUESTS)
async def test_requests_that_can_not_be_name_the_field(
    server: Server, request_: pb.EncodeRequest, reason: str, field: str
) -> None:
    seen = await refusal(server.stub.Encode(request_, timeout=SECONDS))
    assert (seen.reason, seen.field) == (reason, field)
    assert seen.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


async def test_an_unknown_modality_is_refused(server: Server) -> None:
    media = pb.Media(modality=7, data=solid("red"))  # type: ignore[arg-type]
    seen = await refusal(server.stub.Encode(pb.EncodeRequest(media=media), timeout=SECONDS))
    assert (seen.reason, seen.field) == ("INVALID_REQUEST", "media.modality")


def header(**fields: Any) -> pb.StreamEncodeRequest:
    values = {"modality": pb.MODALITY_IMAGE, "size_bytes": 4} | fields
    return pb.StreamEncodeRequest(header=pb.StreamEncodeHeader(**values))


CHUNK = pb.StreamEncodeRequest(chunk=b"ab")
BAD_STREAMS: list[tuple[list[pb.StreamEncodeRequest], str, str]] = [
    ([], "INVALID_REQUEST", "header"),
    ([CHUNK], "INVALID_REQUEST", "header"),
    ([pb.StreamEncodeRequest()], "INVALID_REQUEST", "header"),
    ([header(), header()], "INVALID_REQUEST", "chunk"),
    ([header(), pb.StreamEncodeRequest(chunk=b"")], "INVALID_REQUEST", "chunk"),
    ([header(), CHUNK, CHUNK, CHUNK], "INVALID_REQUEST", "chunk"),
    ([header(), CHUNK], "INVALID_REQUEST", "header.size_bytes"),
    ([header(size_bytes=0)], "INVALID_REQUEST", "header.size_bytes"),
    ([header(size_bytes=-1)], "INVALID_REQUEST", "header.size_bytes"),
    ([header(modality=pb.MODALITY_UNSPECIFIED)], "INVALID_REQUEST", "header.modality"),
    ([header(modality=pb.MODALITY_VIDEO), CHUNK, CHUNK], "INVALID_MEDIA", "media.data"),
    ([header(near_match=pb.NearMatchPolicy(tolerance=1))], "NOT_SUPPORTED", "header.near_match"),
    (
        [header(settings=pb.MediaSettings(max_pixels=0))],
        "INVALID_MEDIA_SETTINGS",
        "header.settings.max_pixels",
    ),
    ([header(size_bytes=1 << 40)], "MEDIA_TOO_LARGE", "media.data"),
]


@pytest.mark.parametrize(("messages", "reason", "field"), BAD_STREAMS)
async def test_streams_that_can_not_be_name_the_field(
    server: Server, messages: list[pb.StreamEncodeRequest], reason: str, field: str
) -> None:
    seen = await refusal(server.stub.StreamEncode(iter(messages), timeout=SECONDS))
    assert (seen.reason, seen.field) == (reason, field)
    assert await is_healthy(server)


async def test_a_declared_size_is_refused_before_any_chunk_is_read(server: Server) -> None:
    may_send = asyncio.Event()

    async def waits_after_the_header() -> AsyncIterator[pb.StreamEncodeRequest]:
        yield header(size_bytes=LIMITS.max_bytes + 1)
        await may_send.wait()

    seen = await refusal(server.stub.StreamEncode(waits_after_the_header(), timeout=SECONDS))
    assert (seen.reason, seen.metadata["value"]) == ("MEDIA_TOO_LARGE", str(LIMITS.max_bytes))


# R03
async def test_health_answers_while_100_mb_are_sent(preprocessor: ImagePreprocessor) -> None:
    data = bytes(100 * 1000 * 1000)
    limits = MediaLimits(len(data), LIMITS.max_pixels, LIMITS.max_side)
    async with serving(preprocessor, limits=limits) as server:
        chunks = stream(data, chunk_bytes=1 << 20)
        upload = asyncio.ensure_future(refusal(server.stub.StreamEncode(chunks, timeout=SECONDS)))
        waits = []
        while not upload.done():
            asked = time.perf_counter()
            await server.health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            waits.append(time.perf_counter() - asked)
            await asyncio.sleep(0.02)
        assert (await upload).reason == "INVALID_MEDIA"
        assert len(waits) > 1
        assert max(waits) < 1


QUERY = pb.FeatureQuery(modality=pb.MODALITY_IMAGE, sha256=bytes(32))
BAD_QUERIES: list[tuple[list[pb.FeatureQuery], str, str]] = [
    ([], "INVALID_REQUEST", "queries"),
    ([QUERY] * 257, "INVALID_REQUEST", "queries"),
    ([QUERY, pb.FeatureQuery(sha256=bytes(32))], "INVALID_REQUEST", "queries[1].modality"),
    ([pb.FeatureQuery(modality=IMAGE)], "INVALID_REQUEST", "queries[0].sha256"),
    ([pb.FeatureQuery(modality=IMAGE, sha256=bytes(31))], "INVALID_REQUEST", "queries[0].sha256"),
    ([pb.FeatureQuery(modality=IMAGE, frames=pb.FrameDigests())], "INVALID_REQUEST", "queries[0].frames"),
    ([pb.FeatureQuery(modality=VIDEO, frames=pb.FrameDigests())], "INVALID_REQUEST", "queries[0].frames"),
    (
        [pb.FeatureQuery(modality=VIDEO, frames=pb.FrameDigests(sha256=[bytes(31)], fps=1))],
        "INVALID_REQUEST",
        "queries[0].frames.sha256",
    ),
    (
        [pb.FeatureQuery(modality=IMAGE, sha256=bytes(32), settings=pb.MediaSettings(fps=1))],
        "INVALID_MEDIA_SETTINGS",
        "queries[0].settings.fps",
    ),
]


@pytest.mark.parametrize(("queries", "reason", "field"), BAD_QUERIES)
async def test_queries_that_can_not_be_name_the_field(
    server: Server, queries: list[pb.FeatureQuery], reason: str, field: str
) -> None:
    call = server.stub.LookupFeatures(pb.LookupFeaturesRequest(queries=queries), timeout=SECONDS)
    seen = await refusal(call)
    assert (seen.reason, seen.field) == (reason, field)


# B09
async def test_a_full_queue_says_when_to_come_back(preprocessor: ImagePreprocessor) -> None:
    async with serving(preprocessor, max_queue_items=2) as server:
        server.encoder.tower.gate.clear()
        busy = server.stub.Encode(image(solid("white")), timeout=SECONDS)
        await asyncio.to_thread(server.encoder.tower.entered.wait, 10)
        calls = [server.stub.Encode(image(solid((n, 0, 0))), timeout=SECONDS) for n in range(5)]
        refused = await asyncio.gather(*(refusal(call) for call in calls[2:]))
        assert [seen.reason for seen in refused] == ["QUEUE_FULL"] * 3
        assert all(seen.retry_seconds for seen in refused)
        server.encoder.tower.gate.set()
        await asyncio.gather(busy, *calls[:2])


# C23
async def test_sixteen_calls_at_once_run_the_tower_once(server: Server) -> None:
    calls = [server.stub.Encode(image(solid("red")), timeout=SECONDS) for _ in range(16)]
    answers = await asyncio.gather(*calls)
    assert server.encoder.tower.passes == [1]
    assert len({answer.feature.key for answer in answers}) == 1


# B05, B07
async def test_a_call_that_leaves_costs_no_pass(server: Server) -> None:
    server.encoder.tower.gate.clear()
    busy = server.stub.Encode(image(solid("white")), timeout=SECONDS)
    await asyncio.to_thread(server.encoder.tower.entered.wait, 10)
    calls = [server.stub.Encode(image(solid((n, 0, 0))), timeout=SECONDS) for n in range(10)]
    await asyncio.sleep(0.3)
    for call in calls[:9]:
        call.cancel()
    await asyncio.sleep(0.3)
    server.encoder.tower.gate.set()
    await asyncio.gather(busy, calls[9])
    assert server.encoder.tower.passes == [1, 1]


async def test_a_deadline_is_kept(server: Server) -> None:
    server.encoder.tower.gate.clear()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.stub.Encode(image(solid("red")), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_spans_say_who_led(preprocessor: ImagePreprocessor, spans: InMemorySpanExporter) -> None:
    store, table = a_store(), LeaseTable()
    async with (
        an_encoder(preprocessor, store=store, leases=MemoryFeatureLeases(table)) as one,
        an_encoder(preprocessor, store=store, leases=MemoryFeatureLeases(table)) as other,
    ):
        await asyncio.gather(*(each.service.encode(picture(solid("red"))) for each in (one, other)))
    attributes = [span.attributes or {} for span in spans.get_finished_spans() if span.name == "encode.lease"]
    assert sorted(str(each["lenspair.lease.role"]) for each in attributes) == ["follower", "leader"]
