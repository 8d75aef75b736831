"""The register of a key's writes in Redis, and what a hostile, full or forgetful server makes of it."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from demo.embedded_store import EmbeddedStore
from shared.errors import StoreFull, StoreUnavailable
from shared.store import redis_lifetime as lifetime
from shared.store.names import chunk_names, manifest_name, register_name
from shared.store.redis_connection import RedisConnections
from shared.store.store import FeatureStore
from tests.contract.backends import RedisBackend
from tests.feature_samples import make_bundle, make_key
from tests.redis_servers import SERVER_KINDS, start_server

KEY = make_key("a")
REGISTER = register_name(KEY)


@pytest.fixture
async def store(redis_backend: RedisBackend) -> AsyncIterator[FeatureStore]:
    store = redis_backend.open()
    yield store
    await store.close()


async def test_cancelled_writes_are_removed(redis_backend: RedisBackend) -> None:
    store = redis_backend.open(chunk_bytes=16)
    randomness = random.Random(5)
    for _ in range(30):
        writing = asyncio.create_task(store.put(KEY, make_bundle()))
        await asyncio.sleep(randomness.uniform(0, 0.01))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    await asyncio.sleep(0.05)  # a cancelled command may still be on its way
    assert len(await redis_backend.names()) > 1
    await store.delete(KEY)
    assert await redis_backend.names() == []
    await store.close()


async def test_a_late_refresh_shortens_nothing(redis_backend: RedisBackend, store: FeatureStore) -> None:
    """A reader decides that a refresh is due; before it comes, somebody keeps the record for longer."""
    manifest = (await store.put(KEY, make_bundle())).manifest
    await store.keep_alive(KEY, 1000)
    connections = RedisConnections.open(redis_backend.url, timeout_seconds=5, connections=1)
    (left_ms,) = await connections.round_trip(REGISTER, [lifetime.keep(manifest, 60_000)])
    await connections.close()
    assert left_ms > 990_000
    assert min([await redis_backend.seconds_left(name) for name in await redis_backend.names()]) > 990


async def test_keeping_a_write_that_was_overwritten_changes_nothing(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    old = (await store.put(KEY, make_bundle())).manifest
    new = (await store.put(KEY, make_bundle())).manifest
    connections = RedisConnections.open(redis_backend.url, timeout_seconds=5, connections=1)
    commands = [lifetime.keep(old, 1_000_000), lifetime.keep(new, 1_000_000)]
    first, second = await connections.round_trip(REGISTER, commands)
    await connections.close()
    assert (first, second > 990_000) == (lifetime.OVERWRITTEN, True)
    assert await redis_backend.seconds_left(chunk_names(old)[0]) <= 60


async def test_writes_whose_time_has_passed_leave_the_register(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await redis_backend.client.zadd(REGISTER, {"0" * 32 + ":4": 1_000_000_000_000})
    new = (await store.put(KEY, make_bundle())).manifest
    members = await redis_backend.client.zrange(REGISTER, 0, -1)
    assert set(members) == {f"{write.write_id}:4".encode() for write in (manifest, new)}


async def test_an_evicted_register_costs_only_what_no_manifest_names(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    old = (await store.put(KEY, make_bundle())).manifest
    await store.put(KEY, make_bundle())
    await redis_backend.remove(REGISTER)
    assert await store.delete(KEY) is True
    assert await redis_backend.names() == sorted(chunk_names(old))
    assert await store.fetch(old) is None


async def test_a_read_registers_a_record_again_that_an_older_encoder_wrote(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    await redis_backend.remove(REGISTER)
    await store.keep_alive(KEY, 100)
    await store.put(KEY, make_bundle())
    await store.delete(KEY)
    assert await redis_backend.names() == []


@pytest.mark.parametrize("kind", ["string", "list"])
async def test_another_type_under_the_registers_name_hinders_nobody(
    redis_backend: RedisBackend, store: FeatureStore, kind: str
) -> None:
    async def spoil() -> None:
        await redis_backend.client.delete(REGISTER)
        await (redis_backend.client.set if kind == "string" else redis_backend.client.rpush)(REGISTER, "x")

    await spoil()
    await store.put(KEY, make_bundle())
    await spoil()
    assert await store.keep_alive(KEY, 100) is not None
    await spoil()
    assert await store.delete(KEY) is True
    assert await redis_backend.names() == []


async def test_hostile_members_of_the_register_are_dropped_unread(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    other = manifest_name(make_key("b"))
    members = [bytes(8 * 1024**2), b"\xff", b"", f"{'0' * 32}:99999".encode(), f"{'0' * 32}:-1".encode()]
    members.append(f"x}}:m {other}".encode())
    for member in members:
        await redis_backend.client.zadd(REGISTER, {member: 9e12})
    await redis_backend.write(other, b"x")
    connections = RedisConnections.open(redis_backend.url, timeout_seconds=5, connections=1)
    (sent,) = await connections.round_trip(REGISTER, [lifetime.read_register(KEY)])
    await connections.close()
    assert sum(map(len, sent)) < 300
    assert await store.delete(KEY) is True
    assert await redis_backend.names() == [other]


async def test_a_register_of_more_writes_than_a_key_ever_sees_is_dropped_unread(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    members: dict[str, float] = {f"{number:032x}:65536": 9e12 for number in range(10_001)}
    await redis_backend.client.zadd(REGISTER, members)
    assert await store.delete(KEY) is True
    assert await redis_backend.names() == []


@pytest.mark.parametrize("refused", [b"", b"\x08"])
async def test_a_refused_manifest_is_not_discarded_once_another_stands_in_its_place(
    redis_backend: RedisBackend, store: FeatureStore, refused: bytes
) -> None:
    """However short it was, and whether or not its bytes are somewhere in the new one."""
    await store.put(KEY, make_bundle())
    connections = RedisConnections.open(redis_backend.url, timeout_seconds=5, connections=1)
    await connections.round_trip(REGISTER, [lifetime.discard(KEY, refused)])
    await connections.close()
    assert await store.look_up(KEY) is not None


async def test_a_stopped_server_costs_one_time_out(
    server: EmbeddedStore, redis_backend: RedisBackend
) -> None:
    store = redis_backend.open(timeout_seconds=0.3)
    await store.put(KEY, make_bundle())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for call in (store.keep_alive(KEY, 9), store.describe(KEY), store.survey("0" * 64)):
            with pytest.raises(StoreUnavailable):
                await call
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await store.keep_alive(KEY, 9) is not None
    await store.close()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_full_server_lets_features_be_read_kept_counted_and_deleted(kind: str) -> None:
    with start_server(kind, {"maxmemory-policy": "noeviction"}) as server:
        backend = RedisBackend(server.url)
        store = backend.open()
        await store.put(KEY, make_bundle())
        await backend.client.set("ballast", bytes(9 * 1024**2))
        await backend.client.config_set("maxmemory", "1mb")
        for name in await backend.names():
            await backend.set_seconds_left(name, 5)
        with pytest.raises(StoreFull):
            await store.put(make_key("b"), make_bundle())
        assert await store.look_up(KEY) is not None
        assert await store.keep_alive(KEY, 100) is not None
        counted = await store.survey("0" * 64)
        assert counted.memory is not None
        assert (counted.entries, counted.memory.max_bytes) == (1, 1024**2)
        assert await store.delete(KEY) is True
        assert await backend.names() == ["ballast"]
        await store.close()
        await backend.client.aclose()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_server_that_does_not_tell_its_memory_is_surveyed_all_the_same(kind: str) -> None:
    with start_server(kind) as server:
        backend = RedisBackend(server.url)
        store = backend.open()
        await store.put(KEY, make_bundle())
        await backend.client.acl_setuser(
            "default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"], reset=True
        )
        counted = await store.survey("0" * 64)
        assert (counted.entries, counted.memory) == (1, None)
        await store.close()
        with suppress(Exception):
            await backend.client.aclose()
