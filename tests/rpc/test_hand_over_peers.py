"""Whoever answers for an encoder, and whatever a source says: no wrong answer, no hang, a typed error."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from decoder_service.feature_reader import FeatureShape
from decoder_service.prompt import PromptBuilder
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import StoreUnavailable
from shared.features.codec import EncodedRecord
from shared.features.grid import Grid
from shared.features.key import FeatureKey, tenant_tag
from shared.features.source import Address
from shared.pb.lenspair.decoder.v1 import decoder_pb2
from shared.pb.lenspair.encoder.v1.encoder_pb2 import FetchFeaturesRequest, FetchFeaturesResponse
from shared.rpc.call import Call, RunningCalls
from shared.rpc.channel import open_channel
from shared.rpc.feature_source import FeatureCalls
from shared.store.memory import MemoryFeatureStore
from shared.store.store import StoredFeature
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_bundle, same_bytes
from tests.rpc.hand_over_pair import (
    FINGERPRINT,
    SEAL,
    TIMEOUT_SECONDS,
    Decoder,
    Peer,
    a_codec,
    question,
    served_decoder,
    served_peer,
)
from tests.rpc.servers import Failure, failure_of

SECONDS = 20
MOST_SECONDS = 2 * TIMEOUT_SECONDS + 2
SHAPE = FeatureShape(FINGERPRINT, HIDDEN_SIZE, LEVELS)
KEY = FeatureKey(tenant_tag(""), "1" * 64, "a" * 64)
OTHER_KEY = FeatureKey(tenant_tag(""), "1" * 64, "b" * 64)
BUNDLE = make_bundle(grid=Grid(1, 24, 24))
RECORD = a_codec().encode(KEY, BUNDLE)

Answer = Callable[[FetchFeaturesRequest], AsyncIterator[Any]]


class UnavailableStore(MemoryFeatureStore):
    """A store that never answers."""

    def __init__(self) -> None:
        super().__init__(a_codec(), ttl_seconds=60)

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        raise StoreUnavailable("the feature store does not answer")


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture(params=["unavailable", "empty"])
def store(request: pytest.FixtureRequest) -> MemoryFeatureStore:
    if request.param == "unavailable":
        return UnavailableStore()
    return MemoryFeatureStore(a_codec(), ttl_seconds=60)


@pytest.fixture
async def decoder(prompts: PromptBuilder, store: MemoryFeatureStore) -> AsyncIterator[Decoder]:
    async with served_decoder(prompts, store, shape=SHAPE) as running:
        yield running


@pytest.fixture
async def peer() -> Peer:
    return Peer()


@pytest.fixture
async def address(peer: Peer) -> AsyncIterator[Address]:
    async with served_peer(peer) as served:
        yield served


def ask(decoder: Decoder, source: str, key: FeatureKey = KEY) -> Any:
    request = decoder_pb2.GenerateRequest(task=question(key, source))
    return decoder.stub.Generate(request, timeout=SECONDS)


async def refused(decoder: Decoder, source: str, store: MemoryFeatureStore) -> Failure:
    """The store's own error, in bounded time, and nothing given to the engine."""
    started, loaded = time.monotonic(), len(decoder.engine.features)
    failure = await failure_of(ask(decoder, source))
    assert time.monotonic() - started < MOST_SECONDS
    is_down = isinstance(store, UnavailableStore)
    assert failure.reason == ("STORE_UNAVAILABLE" if is_down else "FEATURE_NOT_FOUND")
    assert len(decoder.engine.features) == loaded
    return failure


def manifest(record: EncodedRecord = RECORD) -> FetchFeaturesResponse:
    return FetchFeaturesResponse(manifest=record.sealed_manifest)


def pieces(record: EncodedRecord = RECORD, *, size: int = 3000) -> list[FetchFeaturesResponse]:
    data = b"".join(record.chunks)
    return [FetchFeaturesResponse(piece=data[start : start + size]) for start in range(0, len(data), size)]


def said(*messages: Any, wait: float = 0.0) -> Answer:
    """An answer of these messages, then a wait."""

    async def answer(_request: FetchFeaturesRequest) -> AsyncIterator[Any]:
        for message in messages:
            yield message
        await asyncio.sleep(wait)

    return answer


def then(*messages: Any, wait: float = 0.0) -> Answer:
    """Whole and true manifests; these messages after the one that begins a tensor."""

    async def answer(request: FetchFeaturesRequest) -> AsyncIterator[Any]:
        yield manifest()
        if not request.manifest_only:
            for message in messages:
                yield message
            await asyncio.sleep(wait)

    return answer


async def _endless_pieces(request: FetchFeaturesRequest) -> AsyncIterator[Any]:
    yield manifest()
    while not request.manifest_only:
        yield FetchFeaturesResponse(piece=bytes(900_000))


async def _dripping_pieces(request: FetchFeaturesRequest) -> AsyncIterator[Any]:
    yield manifest()
    for byte in b"".join(RECORD.chunks) if not request.manifest_only else b"":
        yield FetchFeaturesResponse(piece=bytes([byte]))
        await asyncio.sleep(0.02)


async def _another_write(_request: FetchFeaturesRequest) -> AsyncIterator[Any]:
    record = a_codec().encode(KEY, BUNDLE)
    for message in [manifest(record), *pieces(record)]:
        yield message


async def _crashing(_request: FetchFeaturesRequest) -> AsyncIterator[Any]:
    yield manifest()
    raise RuntimeError("a secret of the peer")


def _damaged() -> list[FetchFeaturesResponse]:
    messages = pieces()
    messages[5] = FetchFeaturesResponse(piece=bytes(len(messages[5].piece)))
    return messages


def _of_wider_model() -> EncodedRecord:
    return a_codec(b"another store key").encode(KEY, BUNDLE)


def _of_other_key() -> EncodedRecord:
    return a_codec().encode(OTHER_KEY, BUNDLE)


PEERS: dict[str, Answer] = {
    "nothing": said(),
    "silence": said(wait=60),
    "silence after the manifest": then(wait=60),
    "an empty message": said(FetchFeaturesResponse()),
    "an empty manifest": said(FetchFeaturesResponse(manifest=b"")),
    "bytes that are no message": said(b"\xff\xff\xff\xff junk"),
    "no message after the manifest": then(b"\xff\xff\xff\xff junk"),
    "a piece first": said(*pieces()),
    "a manifest of junk": said(FetchFeaturesResponse(manifest=bytes(500))),
    "a manifest that was changed": said(
        FetchFeaturesResponse(manifest=RECORD.sealed_manifest.replace(b"bfloat16", b"float16\x00"))
    ),
    "a manifest of 1.5 MiB": said(FetchFeaturesResponse(manifest=bytes(1_500_000))),
    "a message of 5 MB": said(FetchFeaturesResponse(manifest=bytes(5_000_000))),
    "a record of another store key": said(manifest(_of_wider_model()), *pieces(_of_wider_model())),
    "another key's record": said(manifest(_of_other_key()), *pieces(_of_other_key())),
    "another key's tensor": then(*pieces(_of_other_key())[:1], *pieces()[2:]),
    "another write each time": _another_write,
    "a truncated tensor": then(*pieces()[:-1]),
    "no tensor": then(),
    "a damaged piece": then(*_damaged()),
    "swapped pieces": then(*reversed(pieces())),
    "a piece too many": then(*pieces(size=4000)[:-1], FetchFeaturesResponse(piece=bytes(5000))),
    "an empty piece": then(FetchFeaturesResponse(piece=b""), *pieces()),
    "a second manifest": then(manifest(), *pieces()),
    "endless pieces": _endless_pieces,
    "a byte now and then": _dripping_pieces,
    "a crash": _crashing,
}


@pytest.mark.parametrize("answer", PEERS.values(), ids=PEERS.keys())
async def test_what_a_peer_may_say(
    decoder: Decoder, peer: Peer, address: Address, store: MemoryFeatureStore, answer: Answer
) -> None:
    peer.answer = answer
    source = SEAL.close(address, KEY)
    await refused(decoder, source, store)
    assert peer.requests
    peer.answer = said(manifest(), *pieces())  # the next request is none the worse
    await ask(decoder, source)
    [bundle] = decoder.engine.features[0]
    assert same_bytes(bundle.tensor, BUNDLE.tensor)


@pytest.mark.parametrize("size", [1, 1000, 4096, 4097, 20_000, 1_000_000])
async def test_pieces_may_be_cut_anywhere(decoder: Decoder, peer: Peer, address: Address, size: int) -> None:
    count = 97 if size == 1 else None
    cut = [*pieces(size=size)[:count], *_rest_behind(count)]
    peer.answer = then(*cut, wait=60)  # what comes after the last byte is not waited for
    await ask(decoder, SEAL.close(address, KEY))
    [bundle] = decoder.engine.features[0]
    assert same_bytes(bundle.tensor, BUNDLE.tensor)


def _rest_behind(count: int | None) -> list[FetchFeaturesResponse]:
    return [] if count is None else [FetchFeaturesResponse(piece=b"".join(RECORD.chunks)[count:])]


@asynccontextmanager
async def _listening(answer: bytes) -> AsyncIterator[Address]:
    """A port that speaks no HTTP/2: it says this, or nothing, and keeps the connection."""

    connections: list[asyncio.StreamWriter] = []

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
    for connection in connections:
        connection.close()
        with suppress(OSError):
            await connection.wait_closed()


@pytest.mark.parametrize("answer", [b"", b"-ERR unknown command\r\n", struct.pack(">IB", 1 << 24, 4) * 100])
async def test_ports_that_speak_no_grpc(decoder: Decoder, store: MemoryFeatureStore, answer: bytes) -> None:
    async with _listening(answer) as address:
        await refused(decoder, SEAL.close(address, KEY), store)


async def test_a_port_that_is_closed(decoder: Decoder, store: MemoryFeatureStore, address: Address) -> None:
    async with served_peer(Peer()) as gone:
        pass
    await refused(decoder, SEAL.close(gone, KEY), store)


# --- sources ------------------------------------------------------------------------------------------


def _forgeries(address: Address) -> dict[str, str]:
    source = SEAL.close(address, KEY)
    tag = source.rpartition("/")[2]
    return {
        "no tag": str(address),
        "an empty tag": f"{address}/",
        "a guessed tag": f"{address}/{'0' * 64}",
        "another port": f"{address.host}:{address.port % 65_535 + 1}/{tag}",
        "another host": f"127.0.0.2:{address.port}/{tag}",
        "the tag of another key": SEAL.close(address, OTHER_KEY),
        "a tag and something behind it": f"{source}0",
        "a URL": f"http://{source}",
        "a socket": f"unix:/run/encoder.sock/{tag}",
        "junk": "\x00\r\n" * 1000,
    }


@pytest.mark.parametrize("name", _forgeries(Address("a", 1)).keys())
async def test_nobody_is_asked_for_a_forged_source(
    decoder: Decoder, peer: Peer, address: Address, store: MemoryFeatureStore, name: str
) -> None:
    peer.answer = said(manifest(), *pieces())
    before = _counted("forged")
    await refused(decoder, _forgeries(address)[name], store)
    assert decoder.dials == []
    assert peer.requests == []
    assert _counted("forged") == before + 1


@pytest.mark.parametrize("allowed", ["10.0.0.0/8", "localhost", "127.0.0.1:1", "*.local"])
async def test_nobody_outside_of_the_list_is_asked(
    prompts: PromptBuilder, peer: Peer, address: Address, store: MemoryFeatureStore, allowed: str
) -> None:
    async with served_decoder(prompts, store, shape=SHAPE, allowed=allowed) as decoder:
        await refused(decoder, SEAL.close(address, KEY), store)
        assert decoder.dials == []
    assert peer.requests == []


async def test_a_name_is_asked_when_it_is_listed(
    prompts: PromptBuilder, peer: Peer, address: Address, store: MemoryFeatureStore
) -> None:
    peer.answer = said(manifest(), *pieces())
    by_name = Address("localhost", address.port)
    async with served_decoder(prompts, store, shape=SHAPE, allowed="localhost") as decoder:
        await ask(decoder, SEAL.close(by_name, KEY))
        assert decoder.dials == [by_name]


async def test_a_stored_feature_is_never_asked_for(prompts: PromptBuilder, address: Address) -> None:
    store = MemoryFeatureStore(a_codec(), ttl_seconds=60)
    await store.put(KEY, BUNDLE)
    async with served_decoder(prompts, store, shape=SHAPE) as decoder:
        await ask(decoder, SEAL.close(address, KEY))
        assert decoder.dials == []


async def test_a_handed_over_feature_serves_one_request(
    decoder: Decoder, peer: Peer, address: Address, store: MemoryFeatureStore
) -> None:
    peer.answer = said(manifest(), *pieces())
    await ask(decoder, SEAL.close(address, KEY))
    assert store.values == {}
    decoder.engine.requests.clear()
    await refused(decoder, "", store)


async def test_the_features_of_another_checkpoint_are_refused(
    prompts: PromptBuilder, peer: Peer, address: Address, store: MemoryFeatureStore
) -> None:
    peer.answer = said(manifest(), *pieces())
    other = FeatureShape("e" * 64, HIDDEN_SIZE, LEVELS)
    async with served_decoder(prompts, store, shape=other) as decoder:
        failure = await failure_of(ask(decoder, SEAL.close(address, KEY)))
    assert failure.reason == "FEATURE_REVISION_MISMATCH"


async def test_one_source_beside_a_repeated_key_is_enough(
    decoder: Decoder, peer: Peer, address: Address
) -> None:
    peer.answer = said(manifest(), *pieces())
    task = question(KEY)
    task.turns[0].parts.add(feature_key=str(KEY), feature_source=SEAL.close(address, KEY))
    await decoder.stub.Generate(decoder_pb2.GenerateRequest(task=task), timeout=SECONDS)
    assert len(decoder.engine.features[0]) == 2
    assert [request.manifest_only for request in peer.requests] == [True, False]


async def test_a_caller_who_has_less_time_is_not_kept(decoder: Decoder, peer: Peer, address: Address) -> None:
    peer.answer = said(wait=60)
    request = decoder_pb2.GenerateRequest(task=question(KEY, SEAL.close(address, KEY)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decoder.stub.Generate(request, timeout=TIMEOUT_SECONDS / 4)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# --- what goes along, what is seen, what is kept open ----------------------------------------------------


async def test_the_caller_s_tenant_and_trace_go_along(
    decoder: Decoder, peer: Peer, address: Address, spans: InMemorySpanExporter
) -> None:
    key = FeatureKey(tenant_tag("acme"), KEY.namespace, KEY.digest)
    record = a_codec().encode(key, BUNDLE)
    peer.answer = said(manifest(record), *pieces(record))
    request = decoder_pb2.GenerateRequest(task=question(key, SEAL.close(address, key)))
    metadata = (("x-tenant", "acme"), ("x-secret", "not for others"))
    await decoder.stub.Generate(request, timeout=SECONDS, metadata=metadata)
    assert [sent.get("x-tenant") for sent in peer.metadata] == ["acme", "acme"]
    assert not any("x-secret" in sent for sent in peer.metadata)
    seen = {span.name: span for span in spans.get_finished_spans()}
    for step, sent in zip(("manifest", "tensor"), peer.metadata, strict=True):
        span = seen[f"decode.hand_over_{step}"]
        assert span.attributes is not None
        assert span.attributes["lenspair.hand_over.outcome"] == step
        assert span.context is not None
        assert f"{span.context.span_id:016x}" in str(sent["traceparent"])
    assert not any(str(key) in str(span.attributes) for span in seen.values())


async def test_outcomes_are_counted(decoder: Decoder, peer: Peer, address: Address) -> None:
    source = SEAL.close(address, KEY)
    before = {name: _counted(name) for name in ("manifest", "tensor", "timed_out", "unusable")}
    for answer in (said(wait=60), said(), said(manifest(), *pieces())):
        peer.answer = answer
        with suppress(grpc.aio.AioRpcError):
            await ask(decoder, source)
    assert {name: _counted(name) - before[name] for name in before} == dict.fromkeys(before, 1)


async def test_channels_are_used_again_and_few_are_kept(prompts: PromptBuilder) -> None:
    store = MemoryFeatureStore(a_codec(), ttl_seconds=60)
    peers = [Peer() for _ in range(3)]
    for one in peers:
        one.answer = said(manifest(), *pieces())
    async with (
        served_peer(peers[0]) as first,
        served_peer(peers[1]) as second,
        served_peer(peers[2]) as third,
        served_decoder(prompts, store, shape=SHAPE, max_idle=2) as decoder,
    ):
        for address in (first, second, first, third, first, second):
            await ask(decoder, SEAL.close(address, KEY))
        # The second was used longest ago when the third came.
        assert decoder.dials == [first, second, third, second]


async def test_a_channel_in_use_is_not_closed(peer: Peer, address: Address) -> None:
    channels: list[grpc.aio.Channel] = []

    def dial(to: Address) -> grpc.aio.Channel:
        channels.append(open_channel(to))
        return channels[-1]

    calls = FeatureCalls(open_channel=dial, max_idle=0)
    peer.answer = said(manifest(), *pieces())
    call = Call(deadline=0.0, tenant=KEY.tenant, timeout=asyncio.timeout(None))
    with RunningCalls().entered(call):
        fetched = await asyncio.gather(*(_fetch_all(calls, address) for _ in range(4)))
    assert [parts[1:] for parts in fetched] == [[message.piece for message in pieces()]] * 4
    assert len(channels) == 1
    assert channels[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def _fetch_all(calls: FeatureCalls, address: Address) -> list[bytes]:
    fetched = calls.fetch(address, KEY, timeout_seconds=SECONDS, manifest_only=False)
    return [part async for part in fetched]


def _counted(outcome: str) -> float:
    value = REGISTRY.get_sample_value("lenspair_decoder_hand_overs_total", {"outcome": outcome})
    assert value is not None
    return value
