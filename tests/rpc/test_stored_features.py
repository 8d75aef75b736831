"""The RPCs that look after stored features, over a real server: what callers send, and what they see."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from demo.embedded_store import EmbeddedStore
from encoder_service.preprocess import ImagePreprocessor
from shared.features.key import FeatureKey, tenant_tag
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from tests.contract.backends import RedisBackend
from tests.redis_servers import SERVER_KINDS, start_server
from tests.rpc.test_encoder import SECONDS, Refusal, Server, image, refusal, serving
from tests.unit.encoder.harness import MAX_KEEP_ALIVE_SECONDS
from tests.unit.encoder.samples import encoded, noise, solid

MINE, THEIRS = (("x-tenant", "mine"),), (("x-tenant", "theirs"),)
MISSING = f"{tenant_tag('mine')}.{'1' * 64}.{'2' * 64}"
METHODS = ("KeepAlive", "Evict", "DescribeFeatures")


@pytest.fixture(scope="module")
def preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


@pytest.fixture
async def server(preprocessor: ImagePreprocessor) -> AsyncIterator[Server]:
    async with serving(preprocessor) as running:
        yield running


@pytest.fixture(params=SERVER_KINDS)
def redis_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    with start_server(request.param) as running:
        yield running


async def encode(server: Server, data: bytes, tenant: Any = MINE) -> pb.FeatureRef:
    answer = await server.stub.Encode(image(data), timeout=SECONDS, metadata=tenant)
    feature: pb.FeatureRef = answer.feature
    return feature


async def keep_alive(server: Server, *keys: str, seconds: float = 600, tenant: Any = MINE) -> list[Any]:
    time_to_live = Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))
    request = pb.KeepAliveRequest(keys=keys, time_to_live=time_to_live)
    answer = await server.stub.KeepAlive(request, timeout=SECONDS, metadata=tenant)
    return [r.expire_time.ToDatetime(UTC) if r.HasField("expire_time") else None for r in answer.results]


async def evict(server: Server, *keys: str, tenant: Any = MINE) -> list[bool]:
    answer = await server.stub.Evict(pb.EvictRequest(keys=keys), timeout=SECONDS, metadata=tenant)
    return [result.existed for result in answer.results]


async def describe(server: Server, *keys: str, tenant: Any = MINE) -> list[pb.FeatureDescription | None]:
    request = pb.DescribeFeaturesRequest(keys=keys)
    answer = await server.stub.DescribeFeatures(request, timeout=SECONDS, metadata=tenant)
    return [r.description if r.HasField("description") else None for r in answer.results]


async def stats(server: Server, tenant: Any = MINE) -> pb.GetStoreStatsResponse:
    answer = await server.stub.GetStoreStats(pb.GetStoreStatsRequest(), timeout=SECONDS, metadata=tenant)
    assert isinstance(answer, pb.GetStoreStatsResponse)
    return answer


async def look_up(server: Server, data: bytes) -> bool:
    query = pb.FeatureQuery(modality=pb.MODALITY_IMAGE, sha256=hashlib.sha256(data).digest())
    request = pb.LookupFeaturesRequest(queries=[query])
    answer = await server.stub.LookupFeatures(request, timeout=SECONDS, metadata=MINE)
    return bool(answer.results[0].HasField("feature"))


# --- KeepAlive --------------------------------------------------------------------------------------


async def test_keep_alive_answers_each_key_in_its_place(server: Server) -> None:
    feature = await encode(server, solid("red"))
    first, missing, again = await keep_alive(server, feature.key, MISSING, feature.key, seconds=600)
    assert missing is None
    assert first == again
    assert 590 < (first - datetime.now(UTC)).total_seconds() <= 600
    (described,) = await describe(server, feature.key)
    assert described is not None
    assert described.feature.expire_time.ToDatetime(UTC) == first


async def test_no_later_call_shortens_what_was_kept(server: Server) -> None:
    feature = await encode(server, solid("red"))
    (kept,) = await keep_alive(server, feature.key, seconds=MAX_KEEP_ALIVE_SECONDS)
    (later,) = await keep_alive(server, feature.key, seconds=1e-9)
    assert await look_up(server, solid("red"))
    again = await encode(server, solid("red"))
    assert later == kept == again.expire_time.ToDatetime(UTC)


BAD_TIMES = {
    "none": pb.KeepAliveRequest(keys=[MISSING]),
    "zero": pb.KeepAliveRequest(keys=[MISSING], time_to_live=Duration()),
    "negative": pb.KeepAliveRequest(keys=[MISSING], time_to_live=Duration(seconds=-1)),
    "negative by its nanos": pb.KeepAliveRequest(keys=[MISSING], time_to_live=Duration(nanos=-1)),
    "a second above the limit": pb.KeepAliveRequest(
        keys=[MISSING], time_to_live=Duration(seconds=MAX_KEEP_ALIVE_SECONDS + 1)
    ),
    "a moment above the limit": pb.KeepAliveRequest(
        keys=[MISSING], time_to_live=Duration(seconds=MAX_KEEP_ALIVE_SECONDS, nanos=1_000_000)
    ),
    "the largest": pb.KeepAliveRequest(
        keys=[MISSING], time_to_live=Duration(seconds=2**63 - 1, nanos=2**31 - 1)
    ),
    "the smallest": pb.KeepAliveRequest(keys=[MISSING], time_to_live=Duration(seconds=-(2**63))),
}


@pytest.mark.parametrize("name", BAD_TIMES)
async def test_times_that_can_not_be_name_field_and_limit(server: Server, name: str) -> None:
    seen = await refusal(server.stub.KeepAlive(BAD_TIMES[name], timeout=SECONDS, metadata=MINE))
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert seen.field == "time_to_live"
    if name != "none":
        assert seen.metadata["limit_seconds"] == str(MAX_KEEP_ALIVE_SECONDS)
        assert f"at most {MAX_KEEP_ALIVE_SECONDS} seconds" in seen.message


async def test_exactly_the_limit_is_allowed(server: Server) -> None:
    feature = await encode(server, solid("red"))
    assert await keep_alive(server, feature.key, seconds=MAX_KEEP_ALIVE_SECONDS) != [None]


# --- Evict ------------------------------------------------------------------------------------------


async def test_evict_tells_of_each_key_whether_it_was_there(server: Server) -> None:
    red, blue = await encode(server, solid("red")), await encode(server, solid("blue"))
    assert await evict(server, red.key, MISSING, red.key) == [True, False, True]
    assert await evict(server, red.key) == [False]
    assert not await look_up(server, solid("red"))
    assert await look_up(server, solid("blue"))
    assert (await encode(server, solid("red"))).key == red.key
    assert all(blue.key in name or red.key in name for name in server.encoder.store.values)


async def test_after_evict_redis_holds_no_name_of_the_key(
    preprocessor: ImagePreprocessor, redis_server: EmbeddedStore
) -> None:
    """Two encoders have each stored the feature; a reader still holds the first one's manifest."""
    backend = RedisBackend(redis_server.url)
    store = backend.open()
    async with serving(preprocessor, store=store) as server:
        feature = await encode(server, solid("red", 200, 200))
        other = await encode(server, solid("blue"))
        key = FeatureKey.parse(feature.key)
        held = await store.look_up(key)
        assert held is not None
        bundle = await store.fetch(held.manifest)
        assert bundle is not None
        await store.put(key, bundle)
        assert await evict(server, feature.key) == [True]
        assert {name for name in await backend.names() if feature.key in name} == set()
        assert await store.fetch(held.manifest) is None
        assert await describe(server, feature.key, other.key) != [None, None]
        counted = await stats(server)
        assert counted.entry_count == 1
        assert counted.store_used_bytes > 0
    await store.close()
    await backend.client.aclose()


async def test_an_evicted_feature_is_encoded_again_while_another_call_is_under_way(server: Server) -> None:
    """Evict stops nobody: what is being computed is stored all the same."""
    feature = await encode(server, solid("red"))
    await evict(server, feature.key)
    server.encoder.tower.gate.clear()
    server.encoder.tower.entered.clear()
    running = server.stub.Encode(image(solid("red")), timeout=SECONDS, metadata=MINE)
    while not server.encoder.tower.entered.is_set():
        assert await evict(server, feature.key) == [False]
    server.encoder.tower.gate.set()
    assert (await running).outcome == pb.OUTCOME_ENCODED
    assert await evict(server, feature.key) == [True]


# --- DescribeFeatures -------------------------------------------------------------------------------


async def test_describe_tells_what_encode_told_and_more(server: Server) -> None:
    feature = await encode(server, encoded(noise(200, 120)))
    missing, described = await describe(server, MISSING, feature.key)
    assert missing is None
    assert described is not None
    assert described.feature == feature
    assert (described.dtype, described.hidden_size, described.deepstack_levels) == ("float32", 4, 3)
    assert described.chunk_count == -(-feature.size_bytes // 4096)
    assert described.fingerprint == "0" * 64
    age = datetime.now(UTC) - described.create_time.ToDatetime(UTC)
    assert timedelta(0) <= age < timedelta(seconds=20)


async def test_looking_refreshes_nothing(server: Server) -> None:
    feature = await encode(server, solid("red"))
    for value in server.encoder.store.values.values():
        value.expires_at = datetime.now(UTC) + timedelta(seconds=20)
    before = {name: value.expires_at for name, value in server.encoder.store.values.items()}
    await describe(server, feature.key)
    await stats(server)
    assert {name: value.expires_at for name, value in server.encoder.store.values.items()} == before


# --- GetStoreStats ----------------------------------------------------------------------------------


async def test_stats_count_the_callers_tenant_only(server: Server) -> None:
    red, blue = await encode(server, solid("red")), await encode(server, solid("blue"))
    await encode(server, solid("red"))
    await encode(server, solid("white"), tenant=THEIRS)
    assert await look_up(server, solid("blue"))
    assert not await look_up(server, solid("green"))
    counted = await stats(server)
    assert (counted.entry_count, counted.damaged_count) == (2, 0)
    assert counted.size_bytes == red.size_bytes + blue.size_bytes
    assert counted.oldest_create_time.ToDatetime() <= counted.newest_create_time.ToDatetime()
    assert counted.first_expire_time == red.expire_time
    assert counted.last_expire_time == blue.expire_time
    requests = counted.requests
    assert (requests.hit_count, requests.joined_count) == (2, 0)
    assert (requests.encoded_count, requests.miss_count) == (2, 1)
    assert requests.hit_rate == pytest.approx(0.5)
    assert requests.start_time.ToDatetime(UTC) <= datetime.now(UTC)
    theirs = await stats(server, tenant=THEIRS)
    assert (theirs.entry_count, theirs.requests.encoded_count, theirs.requests.hit_count) == (1, 1, 0)


async def test_stats_of_a_tenant_without_anything_leave_unset_what_is_not_known(server: Server) -> None:
    counted = await stats(server)
    assert counted.entry_count == 0
    for name in ("oldest_create_time", "newest_create_time", "first_expire_time", "last_expire_time"):
        assert not counted.HasField(name)
    assert not counted.requests.HasField("start_time")
    assert not counted.requests.HasField("hit_rate")


async def test_many_who_ask_for_stats_at_once_are_all_answered(server: Server) -> None:
    await encode(server, solid("red"))
    counted = await asyncio.gather(*(stats(server) for _ in range(20)))
    assert {answer.entry_count for answer in counted} == {1}


async def test_stats_count_damage_and_leave_it(server: Server) -> None:
    feature = await encode(server, solid("red"))
    name = f"lenspair:{{{feature.key}}}:m"
    server.encoder.store.values[name].data = b"junk"
    assert (await stats(server)).damaged_count == 1
    assert await describe(server, feature.key) == [None]
    assert name in server.encoder.store.values
    assert (await stats(server)).damaged_count == 1


# --- other tenants, bad keys ------------------------------------------------------------------------


# C14
async def test_a_foreign_key_is_answered_like_a_missing_one_and_nothing_happens_to_it(server: Server) -> None:
    feature = await encode(server, solid("red"))
    before = {name: (value.data, value.expires_at) for name, value in server.encoder.store.values.items()}
    foreign = MISSING.replace(tenant_tag("mine"), tenant_tag("theirs"))
    for key in (feature.key, foreign):
        assert await keep_alive(server, key, tenant=THEIRS) == [None]
        assert await evict(server, key, tenant=THEIRS) == [False]
        assert await describe(server, key, tenant=THEIRS) == [None]
    after = {name: (value.data, value.expires_at) for name, value in server.encoder.store.values.items()}
    assert after == before
    assert await describe(server, feature.key) != [None]


def request_of(method: str, keys: list[str]) -> Any:
    match method:
        case "KeepAlive":
            return pb.KeepAliveRequest(keys=keys, time_to_live=Duration(seconds=60))
        case "Evict":
            return pb.EvictRequest(keys=keys)
        case _:
            return pb.DescribeFeaturesRequest(keys=keys)


async def refused(server: Server, method: str, keys: list[str]) -> Refusal:
    call = getattr(server.stub, method)
    return await refusal(call(request_of(method, keys), timeout=SECONDS, metadata=MINE))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [0, 257])
async def test_too_few_or_too_many_keys(server: Server, method: str, count: int) -> None:
    seen = await refused(server, method, [MISSING] * count)
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert (seen.field, seen.message) == ("keys", f"{count} keys; 1 to 256 are allowed")


@pytest.mark.parametrize("method", METHODS)
async def test_256_keys_are_answered(server: Server, method: str) -> None:
    keys = [MISSING[:-3] + f"{number:03x}" for number in range(256)]
    answer = await getattr(server.stub, method)(request_of(method, keys), timeout=SECONDS, metadata=MINE)
    assert len(answer.results) == 256


BAD_KEYS = [
    "",
    "x",
    MISSING[:-1],
    f"{MISSING}\r\nDEL",
    MISSING.upper(),
    f"{MISSING}}}:m",
    "*",
    "a" * 1_000_000,
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
# C12
async def test_a_malformed_key_is_named_and_nothing_is_done(server: Server, method: str, key: str) -> None:
    feature = await encode(server, solid("red"))
    before = {name: value.expires_at for name, value in server.encoder.store.values.items()}
    seen = await refused(server, method, [feature.key, key])
    assert (seen.code, seen.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_FEATURE_KEY")
    assert seen.field == "keys[1]"
    assert {name: value.expires_at for name, value in server.encoder.store.values.items()} == before


async def test_a_store_that_is_gone_is_unavailable(preprocessor: ImagePreprocessor) -> None:
    backend = RedisBackend("redis://127.0.0.1:1")
    store = backend.open(timeout_seconds=1)
    async with serving(preprocessor, store=store) as server:
        calls = [
            getattr(server.stub, method)(request_of(method, [MISSING]), metadata=MINE) for method in METHODS
        ]
        calls.append(server.stub.GetStoreStats(pb.GetStoreStatsRequest(), metadata=MINE))
        for call in calls:
            seen = await refusal(call)
            assert (seen.code, seen.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    await store.close()
    await backend.client.aclose()
