"""What only a store behind a network can suffer: run against real servers of this suite's own."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from demo.embedded_store import EmbeddedStore
from demo.ports import free_port
from shared.errors import StoreFull, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.store.names import chunk_names, manifest_name
from shared.store.redis_connection import RedisConnections
from shared.store.redis_url import InvalidStoreUrl
from shared.store.store import FeatureStore
from tests.contract.backends import RedisBackend
from tests.contract.slow_network import slow_network
from tests.feature_samples import make_bundle, make_key, same_bytes
from tests.redis_servers import SERVER_KINDS, start_server

KEY = make_key("a")
TIMEOUT_SECONDS = 0.4


@pytest.fixture
async def store(redis_backend: RedisBackend) -> AsyncIterator[FeatureStore]:
    store = redis_backend.open(timeout_seconds=TIMEOUT_SECONDS, connections=2)
    yield store
    await store.close()


async def read(store: FeatureStore, name: str = "a") -> FeatureBundle | None:
    found = await store.look_up(make_key(name))
    return None if found is None else await store.fetch(found.manifest)


async def check_reads(store: FeatureStore, name: str = "a", seed: int = 0) -> None:
    bundle = await read(store, name)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=seed).tensor)


def megabytes(count: int) -> FeatureBundle:
    """A feature of about this size."""
    rows = count * 1024
    return FeatureBundle(
        make_bundle().modality, Grid(1, 2, 2 * rows), torch.zeros(rows, 512, dtype=torch.float16), 128, 3
    )


# --- the server hangs, dies, comes back ---------------------------------------------------------------


async def test_a_stopped_server_costs_one_time_out_and_is_used_again(
    server: EmbeddedStore, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for call in (store.look_up(KEY), store.put(KEY, make_bundle()), store.delete(KEY), store.ping()):
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await call
            assert time.monotonic() - start < TIMEOUT_SECONDS + 0.3
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await store.put(KEY, make_bundle())
    await check_reads(store)


async def test_waiting_for_a_connection_is_bounded_too(server: EmbeddedStore, store: FeatureStore) -> None:
    await store.ping()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        answers = await asyncio.gather(*(store.look_up(KEY) for _ in range(20)), return_exceptions=True)
        assert time.monotonic() - start < TIMEOUT_SECONDS + 0.3
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await store.put(KEY, make_bundle())
    await check_reads(store)


# S15
async def test_a_server_that_stops_in_the_middle_of_a_read(
    server: EmbeddedStore, redis_backend: RedisBackend
) -> None:
    store = redis_backend.open(timeout_seconds=2, chunk_bytes=1 << 20)
    bundle = megabytes(40)
    manifest = (await store.put(KEY, bundle)).manifest
    reading = asyncio.create_task(store.fetch(manifest))
    await asyncio.sleep(0.005)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await reading
    finally:
        os.kill(server.pid, signal.SIGCONT)
    fetched = await store.fetch(manifest)
    assert fetched is not None
    assert same_bytes(fetched.tensor, bundle.tensor)
    await store.close()


# S17
async def test_killed_connections_are_replaced_silently(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    for _ in range(5):
        await redis_backend.client.client_kill_filter(_type="normal", skipme=True)
        await check_reads(store)


# S17
async def test_a_connection_killed_under_a_command_is_retried_once(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    await redis_backend.client.client_pause(150)
    reading = asyncio.create_task(check_reads(store))
    await asyncio.sleep(0.05)
    await redis_backend.client.client_kill_filter(_type="normal", skipme=True)
    await reading


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_server_that_died_is_used_again_after_its_restart(kind: str) -> None:
    port = free_port()
    server = start_server(kind, port=port)
    store = RedisBackend(server.url).open(timeout_seconds=TIMEOUT_SECONDS)
    await store.put(KEY, make_bundle())
    server.stop()
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.look_up(KEY)
    assert time.monotonic() - start < TIMEOUT_SECONDS + 0.3
    with start_server(kind, port=port):
        assert await store.look_up(KEY) is None
        await store.put(KEY, make_bundle())
        await check_reads(store)
        await store.close()


async def test_nothing_listens() -> None:
    store = RedisBackend(f"redis://127.0.0.1:{free_port()}").open(timeout_seconds=TIMEOUT_SECONDS)
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await store.close()


# --- cancellation -----------------------------------------------------------------------------------


# S01
async def test_a_cancelled_read_never_gives_its_answer_to_the_next(
    server: EmbeddedStore, redis_backend: RedisBackend, tmp_path: Path
) -> None:
    writer = redis_backend.open()
    for seed, name in enumerate("ab"):
        await writer.put(make_key(name), make_bundle(seed=seed))
    await writer.close()
    randomness = random.Random(7)
    behind = Path(server.url.removeprefix("unix://"))
    async with slow_network(behind, tmp_path / "slow.sock", delay_seconds=0.002) as url:
        store = redis_backend.open(url=url, connections=1)
        for _ in range(1000):
            cancelled = asyncio.create_task(read(store, "a"))
            await asyncio.sleep(randomness.uniform(0, 0.012))
            cancelled.cancel()
            await check_reads(store, "b", seed=1)
            await asyncio.gather(cancelled, return_exceptions=True)
        await store.close()


async def test_memory_of_a_cancelled_read_is_nobody_elses_while_it_is_filled(
    redis_backend: RedisBackend,
) -> None:
    """Large reads use memory again that earlier features lay in."""
    store = redis_backend.open(connections=4, chunk_bytes=1 << 19)
    for number, name in enumerate("ab"):
        bundle = megabytes(3)
        bundle.tensor.fill_(number + 1)
        await store.put(make_key(name), bundle)
    randomness = random.Random(11)
    for _ in range(300):
        cancelled = asyncio.create_task(read(store, "a"))
        await asyncio.sleep(randomness.uniform(0, 0.004))
        cancelled.cancel()
        found = await asyncio.gather(*(read(store, "b") for _ in range(2)))
        await asyncio.gather(cancelled, return_exceptions=True)
        assert all(bundle is not None and bool((bundle.tensor == 2).all()) for bundle in found)
    await store.close()


async def test_cancellations_do_not_use_up_the_pool(store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    for round_number in range(50):
        tasks = [asyncio.create_task(read(store)) for _ in range(6)]
        await asyncio.sleep(0.0002 * (round_number % 7))
        for task in tasks:
            task.cancel()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(check_reads(store) for _ in range(10)))


# S03
async def test_more_readers_than_connections_wait_and_are_served(redis_backend: RedisBackend) -> None:
    store = redis_backend.open(connections=2)
    await store.put(KEY, make_bundle())
    await asyncio.gather(*(check_reads(store) for _ in range(100)))
    clients = await redis_backend.client.client_list()
    assert len(clients) <= 3
    await store.close()


# --- full, evicted, limited -------------------------------------------------------------------------


# S05
@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_full_server_is_a_typed_error_and_leaves_no_parts(kind: str) -> None:
    with start_server(kind, {"maxmemory": "10mb", "maxmemory-policy": "noeviction"}) as server:
        backend = RedisBackend(server.url)
        store = backend.open(chunk_bytes=1 << 20)
        await store.put(KEY, make_bundle())
        for _ in range(20):  # a part that was still on its way may come after the others were deleted
            with pytest.raises(StoreFull):
                await store.put(make_key("b"), megabytes(20))
        assert {name for name in await backend.names() if str(KEY) not in name} == set()
        await check_reads(store)
        await store.close()
        await backend.client.aclose()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_feature_that_evicts_itself_is_a_typed_error(kind: str) -> None:
    with start_server(kind, {"maxmemory": "10mb", "maxmemory-policy": "allkeys-lru"}) as server:
        backend = RedisBackend(server.url)
        store = backend.open(chunk_bytes=1 << 20)
        with pytest.raises(StoreFull):
            await store.put(KEY, megabytes(20))
        assert await store.look_up(KEY) is None
        await store.close()
        await backend.client.aclose()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_records_whose_parts_were_evicted_are_clean_misses(kind: str) -> None:
    with start_server(kind, {"maxmemory": "20mb", "maxmemory-policy": "allkeys-random"}) as server:
        backend = RedisBackend(server.url)
        store = backend.open(chunk_bytes=100_000)
        for name in "0123456789abcdef":
            with suppress(StoreFull):
                await store.put(make_key(name), megabytes(2))
        hits = [name for name in "0123456789abcdef" if await read(store, name)]
        assert len(hits) < 16
        await store.close()
        await backend.client.aclose()


# S07
@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_values_above_the_servers_limit_are_cut_into_chunks(kind: str) -> None:
    """`proto-max-bulk-len` of 1 MiB stands in for the 512 MiB at which a Redis string ends."""
    with start_server(kind, {"proto-max-bulk-len": "1mb"}) as server:
        backend = RedisBackend(server.url)
        careless, store = backend.open(chunk_bytes=2 << 20), backend.open(chunk_bytes=1000_000)
        with pytest.raises(StoreUnavailable):
            await careless.put(KEY, megabytes(3))
        await careless.ping()
        await store.put(KEY, megabytes(3))
        assert await read(store) is not None
        await careless.close()
        await store.close()
        await backend.client.aclose()


# --- what else may stand under our names -------------------------------------------------------------


async def test_other_types_under_our_names_are_misses(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await redis_backend.client.rpush(manifest_name(KEY), "a list")
    assert await store.look_up(KEY) is None
    assert await redis_backend.names() == []
    manifest = (await store.put(KEY, make_bundle())).manifest
    chunk = chunk_names(manifest)[0]
    await redis_backend.remove(chunk)
    await redis_backend.client.rpush(chunk, "a list")
    assert await store.fetch(manifest) is None
    assert await redis_backend.names() == []


async def test_a_chunk_of_another_type_is_seen_at_look_up(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    chunk = chunk_names((await store.put(KEY, make_bundle())).manifest)[0]
    await redis_backend.remove(chunk)
    await redis_backend.client.rpush(chunk, "a list")
    assert await store.look_up(KEY) is None
    assert await redis_backend.names() == []


async def test_all_parts_share_a_hash_tag(redis_backend: RedisBackend, store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    names = await redis_backend.names()
    assert len(names) == 6
    assert {name.partition("{")[2].partition("}")[0] for name in names} == {str(KEY)}


async def test_a_record_without_a_time_to_live_gets_one(
    redis_backend: RedisBackend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    for name in await redis_backend.names():
        await redis_backend.client.persist(name)
    await check_reads(store)
    assert min([await redis_backend.seconds_left(name) for name in await redis_backend.names()]) > 0


# --- URLs -------------------------------------------------------------------------------------------


# S08
@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost/?decode_responses=true",
        "unix:///tmp/x.sock?decode_responses=True",
        "redis://localhost/?socket_timeout=100",
        "redis://localhost/?max_connections=1",
        "http://localhost:6379",
        "redis://localhost:port",
        "localhost:6379",
        "",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(InvalidStoreUrl):
        RedisConnections.open(url, timeout_seconds=1, connections=1)


def test_a_refused_url_does_not_give_its_password_away() -> None:
    for url in ("redis://:hunter2@localhost/?decode_responses=1", "redis://u:hunter2/x@localhost:a"):
        with pytest.raises(InvalidStoreUrl) as caught:
            RedisConnections.open(url, timeout_seconds=1, connections=1)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_tcp_password_and_database_number(kind: str) -> None:
    with start_server(kind, {"requirepass": "hunter2"}, port=free_port()) as server:
        address = server.url.removeprefix("redis://")
        store = RedisBackend("redis://unused").open(url=f"redis://:hunter2@{address}/3")
        await store.put(KEY, make_bundle())
        await check_reads(store)
        await store.close()
        stranger = RedisBackend("redis://unused").open(url=f"redis://:wrong@{address}/3")
        with pytest.raises(StoreUnavailable) as caught:
            await stranger.ping()
        assert "wrong" not in str(caught.value)
        await stranger.close()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_under_memory_pressure_a_read_gives_the_feature_or_a_clean_miss(kind: str) -> None:
    with start_server(kind, {"maxmemory": "20mb", "maxmemory-policy": "allkeys-lru"}) as server:
        backend = RedisBackend(server.url)
        store = backend.open(chunk_bytes=100_000)
        names = "0123456789abcdef"
        for number, name in enumerate(names):
            bundle = megabytes(2)
            bundle.tensor.fill_(number)
            with suppress(StoreFull):
                await store.put(make_key(name), bundle)
        found = {number: await read(store, name) for number, name in enumerate(names)}
        hits = {number: bundle for number, bundle in found.items() if bundle is not None}
        assert 0 < len(hits) < 16
        assert all(bool((bundle.tensor == number).all()) for number, bundle in hits.items())
        await store.close()
        await backend.client.aclose()
