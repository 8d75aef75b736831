"""The store behind Sentinel: a fail-over costs a moment, and nothing old is used afterwards."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
from redis import Redis

from demo.sentinel_store import MASTER_NAME, SentinelStore
from shared.errors import StoreUnavailable
from shared.store.names import manifest_name
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore
from tests.contract.backends import RedisBackend
from tests.feature_samples import make_bundle, make_key, same_bytes

T = TypeVar("T")
KEY = make_key("a")
# How old the sentinels' word may be when it is used.
NOTICE_SECONDS = 1.1


@pytest.fixture
def servers() -> Iterator[SentinelStore]:
    with SentinelStore() as servers:
        yield servers


def open_store(servers: SentinelStore) -> FeatureStore:
    return RedisBackend(f"redis://127.0.0.1:{servers.master_port}").open(url=servers.url, timeout_seconds=1)


async def until_it_works(call: Callable[[], Awaitable[T]]) -> T:
    """Asks as a client does, who tries again while the store is unavailable."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return await call()
        except StoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_features_are_kept_at_the_master_that_the_sentinels_name(servers: SentinelStore) -> None:
    store = open_store(servers)
    await store.put(KEY, make_bundle())
    found = await store.look_up(KEY)
    assert found is not None
    with Redis(port=servers.master_port) as master:
        assert len(master.keys()) > 1
    await store.close()


async def test_after_the_master_died_its_successor_is_used(servers: SentinelStore) -> None:
    store = open_store(servers)
    await store.put(KEY, make_bundle(seed=1))
    before = servers.master_port
    os.kill(servers.master.pid, signal.SIGKILL)
    await until_it_works(lambda: store.put(KEY, make_bundle(seed=2)))
    servers.wait_for_new_master(before)
    found = await until_it_works(lambda: store.look_up(KEY))
    assert found is not None
    bundle = await store.fetch(found.manifest)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=2).tensor)
    await store.close()


async def test_a_master_that_lost_its_role_is_left(servers: SentinelStore) -> None:
    store = open_store(servers)
    await asyncio.gather(*(store.put(make_key(str(i)), make_bundle()) for i in range(8)))
    servers.switch_over()
    await asyncio.sleep(NOTICE_SECONDS)
    await until_it_works(lambda: store.put(KEY, make_bundle(seed=3)))
    with Redis(port=servers.master_port) as master:
        assert master.exists(manifest_name(KEY))
    await store.close()


async def test_a_replica_that_takes_no_writes_is_a_typed_error(servers: SentinelStore) -> None:
    store = open_store(servers)
    await store.put(KEY, make_bundle())
    with Redis(port=servers.master_port) as master:
        master.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable):
            await store.put(KEY, make_bundle())
        master.execute_command("REPLICAOF", "NO", "ONE")
    await store.put(KEY, make_bundle())
    await store.close()


async def test_a_master_that_is_cut_off_from_the_sentinels_is_left_within_a_second(
    servers: SentinelStore,
) -> None:
    """It goes on answering whoever is connected to it, and knows nothing of what was deleted elsewhere."""
    store = open_store(servers)
    await store.put(KEY, make_bundle())
    old = servers.master_port
    servers.switch_over()
    with Redis(port=old) as island:
        island.execute_command("REPLICAOF", "NO", "ONE")
    other = RedisBackend(f"redis://127.0.0.1:{servers.master_port}").open()
    await other.delete(KEY)
    await asyncio.sleep(NOTICE_SECONDS)
    assert await until_it_works(lambda: store.look_up(KEY)) is None
    await store.close()
    await other.close()


async def test_sentinels_that_are_gone_do_not_stop_a_master_that_works(servers: SentinelStore) -> None:
    store = open_store(servers)
    await store.put(KEY, make_bundle())
    servers.stop_sentinels()
    await asyncio.sleep(NOTICE_SECONDS)
    assert await store.look_up(KEY) is not None
    await store.close()


async def test_a_sentinel_that_keeps_silent_costs_no_call(servers: SentinelStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = servers.url.replace("//", f"//127.0.0.1:{silent.getsockname()[1]},")
        store = RedisBackend("redis://unused").open(url=url, timeout_seconds=2)
        await store.put(KEY, make_bundle())
        assert await store.look_up(KEY) is not None
        await store.close()


async def test_an_unknown_master_is_unavailable(servers: SentinelStore) -> None:
    url = servers.url.replace(MASTER_NAME, "another")
    store = open_feature_store(
        url=url, fingerprint="f" * 64, ttl_seconds=60, timeout_seconds=1, connections=2, chunk_bytes=4096
    )
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await store.close()
