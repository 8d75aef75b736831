"""Connections that break in the middle, and servers that answer what no server should."""

import asyncio
import os
import random
import signal
import socket
import threading
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from demo.embedded_store import EmbeddedStore
from shared.errors import StoreUnavailable
from shared.features.codec import FeatureCodec
from shared.features.grid import Grid
from shared.features.manifest import StoreDtype
from shared.store.names import chunk_names
from shared.store.redis_connection import RedisConnections
from shared.store.redis_socket import RedisSocket
from tests.contract.backends import FINGERPRINT, RedisBackend
from tests.contract.fake_servers import Answer, BreakingNetwork, fake_server
from tests.contract.test_redis_store import megabytes
from tests.feature_samples import make_bundle, make_key, same_bytes

KEY = make_key("a")


@pytest.fixture
async def network(server: EmbeddedStore) -> BreakingNetwork:
    return BreakingNetwork(Path(server.url.removeprefix("unix://")))


@pytest.mark.parametrize("store_dtype", ["model", "fp8"])
async def test_a_read_that_breaks_anywhere_is_repeated_from_its_beginning(
    redis_backend: RedisBackend, network: BreakingNetwork, tmp_path: Path, store_dtype: StoreDtype
) -> None:
    bundle = megabytes(4)
    bundle.tensor.uniform_(-3, 3)
    async with network.open(tmp_path / "proxy.sock") as url:
        store = redis_backend.open(url=url, chunk_bytes=1 << 20, store_dtype=store_dtype)
        manifest = (await store.put(KEY, bundle)).manifest
        whole = await store.fetch(manifest)
        assert whole is not None
        randomness = random.Random(3)
        for count in range(30):
            network.breaks_after = randomness.randrange(1, manifest.size_bytes)
            again = await store.fetch(manifest)
            assert again is not None
            assert same_bytes(again.tensor, whole.tensor)
            assert network.num_broken == count + 1
        await store.close()


async def test_all_that_a_repeated_read_receives_is_verified(
    redis_backend: RedisBackend, network: BreakingNetwork, tmp_path: Path
) -> None:
    """The first attempt receives the only chunk and breaks right after it; then the chunk is damaged."""
    bundle = make_bundle(grid=Grid(1, 80, 80))
    async with network.open(tmp_path / "proxy.sock") as url:
        store = redis_backend.open(url=url, chunk_bytes=1 << 19, store_dtype="fp8")
        manifest = (await store.put(KEY, bundle)).manifest
        (chunk,) = chunk_names(manifest)

        async def damage() -> None:
            await redis_backend.client.setrange(chunk, 5, b"\x11\x12")

        # Before it come the manifest's time to live and the chunk's size.
        network.breaks_after, network.on_break = manifest.size_bytes + 17, damage
        assert await store.fetch(manifest) is None
        assert network.num_broken == 1
        await store.close()


# --- servers that break the rules ---------------------------------------------------------------------


HOSTILE = [
    b"-MOVED\r\n",
    b"-MOVED x y\r\n",
    b"-\xff\xfe\r\n",
    b"-LOADING the dataset\r\n",
    b"-NOAUTH Authentication required.\r\n",
    b"-ERR max number of clients reached\r\n",
    b"-CLUSTERDOWN\r\n",
    b"-ASK 1 127.0.0.1:1\r\n",
    b"-TRYAGAIN\r\n",
    b"-WRONGTYPE\r\n",
    b":0\r\n",
    b":x\r\n",
    b":\r\n",
    b"+OK\r\n",
    b"$x\r\n",
    b"$4000000000\r\n",
    b"$3\r\nabcde\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*x\r\n",
    b"*0\r\n",
    b"*1\r\n" * 5000,
    b"*2\r\n-ERR a\r\n$-1\r\n",
    b"?\r\n",
    b"\r\n",
    b"x" * 5000,
    b"\x00\xff" * 100,
]


def answering(reply: bytes) -> Answer:
    """Gives this reply to every command."""
    return lambda received: reply * max(1, received.count(b"\r\n*") + 1)


@pytest.mark.parametrize("reply", HOSTILE, ids=lambda reply: repr(reply[:16]))
async def test_whatever_a_server_replies_is_a_miss_or_a_typed_error(tmp_path: Path, reply: bytes) -> None:
    manifest = FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=1008).encode(KEY, make_bundle()).manifest
    async with fake_server(tmp_path / "fake.sock", answering(reply)) as url:
        store = RedisBackend(url).open(timeout_seconds=0.3)
        calls = (
            lambda: store.look_up(KEY),
            lambda: store.fetch(manifest),
            lambda: store.put(KEY, make_bundle()),
            lambda: store.delete(KEY),
            lambda: store.keep_alive(KEY, 9),
            lambda: store.describe(KEY),
            lambda: store.survey("0" * 64),
        )
        for call in calls:
            with suppress(StoreUnavailable):
                assert not await call()
        await store.close()


async def test_a_reply_too_many_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    replies = iter([b"$1\r\na\r\n:1\r\n$1\r\nb\r\n:2\r\n", *[b"$1\r\nc\r\n:3\r\n"] * 3])
    async with fake_server(tmp_path / "fake.sock", lambda _: next(replies)) as url:
        connections = RedisConnections.open(url, timeout_seconds=5, connections=1)
        assert await connections.round_trip("x", [("GET", "x"), ("PTTL", "x")]) == [b"a", 1]
        assert await connections.round_trip("x", [("GET", "x"), ("PTTL", "x")]) == [b"c", 3]
        await connections.close()


async def test_exchanges_in_line_end_as_unavailable_when_the_store_is_closed(
    server: EmbeddedStore, redis_backend: RedisBackend
) -> None:
    store = redis_backend.open(timeout_seconds=60, connections=2)
    await store.put(KEY, make_bundle())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        reading = [asyncio.create_task(store.look_up(KEY)) for _ in range(10)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            await store.close()
            answers = await asyncio.gather(*reading, return_exceptions=True)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    with pytest.raises(StoreUnavailable):
        await store.look_up(KEY)


def test_an_exchange_that_was_given_up_while_it_connected_does_not_wait_for_an_answer() -> None:
    """Nothing of it could be shut down then."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        held = RedisSocket({"host": host, "port": port}, 5)
        held.abandon()
        with pytest.raises(RedisError):
            held.begin()
        held.close()


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_ten_thousand_cancellations_leave_no_connection_and_no_thread(
    redis_backend: RedisBackend,
) -> None:
    store = redis_backend.open(connections=3)
    await store.put(KEY, make_bundle())
    before = num_open_files()
    delays = cycle((0, 0, 0.0002, 0.0005, 0.001))
    for _ in range(500):
        tasks = [asyncio.create_task(store.look_up(KEY)) for _ in range(20)]
        await asyncio.sleep(next(delays))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await store.look_up(KEY) is not None
    assert num_open_files() <= before + 3
    assert sum(thread.name.startswith("store") for thread in threading.enumerate()) <= 3
    await store.close()
    assert num_open_files() <= before
