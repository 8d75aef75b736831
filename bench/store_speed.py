"""How fast features go into the store and come out of it, beside a bare socket and plain redis-py.

All move the same bytes to and from the same server, in turns, so that a noisy moment meets all of them. The
bare socket is the ceiling: it has one prepared buffer, and checks, allocates and converts nothing.
"""

import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import numpy as np
import redis
import torch
from tqdm import tqdm

from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality
from shared.settings import SharedSettings
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

MEGABYTES: Final = (1, 8, 32, 128)

_KEY: Final = FeatureKey("1" * 64, "2" * 64, "3" * 64)
_BYTES_A_ROW: Final = 8192
_MEGABYTE: Final = 1_000_000
# Rounds that only warm up caches, sockets and memory.
_FIRST_ROUNDS: Final = 2

# A get is a look-up and a fetch.
Way = Literal["put", "get", "fetch"]
Move = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Megabytes per second of one size, one way."""

    ours: float
    ceiling: float
    redis_py: float

    @property
    def ceiling_share(self) -> float:
        return self.ours / self.ceiling

    @property
    def redis_py_ratio(self) -> float:
        return self.ours / self.redis_py


class BareSocket:
    """SET and GET of one value by hand."""

    def __init__(self, url: str, data: memoryview) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(parts.path)
        else:
            self._socket = socket.create_connection((parts.hostname, parts.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data = data
        self._reply = memoryview(bytearray(len(data) + len(b"$%d\r\n\r\n" % len(data))))

    def put(self) -> None:
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\nbare\r\n$%d\r\n" % len(self._data))
        self._socket.sendall(self._data)
        self._socket.sendall(b"\r\n")
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$4\r\nbare\r\n")
        assert self._socket.recv_into(self._reply, 0, socket.MSG_WAITALL) == len(self._reply)

    def close(self) -> None:
        self._socket.close()


async def measure(url: str, *, rounds: int) -> dict[Way, dict[int, Speeds]]:
    """The speeds by way and by size in MB, the medians of some rounds."""
    speeds: dict[Way, dict[int, Speeds]] = {"put": {}, "get": {}, "fetch": {}}
    store = _open(url)
    try:
        for megabytes in tqdm(MEGABYTES, desc=urlsplit(url).scheme, leave=False, disable=None):
            for way, found in (await _measure_size(url, store, megabytes, rounds)).items():
                speeds[way][megabytes] = found
    finally:
        await store.close()
    return speeds


async def _measure_size(url: str, store: FeatureStore, megabytes: int, rounds: int) -> dict[Way, Speeds]:
    bundle = _feature(megabytes)
    data = bundle.tensor.view(torch.uint8).numpy().reshape(-1).data
    bare, plain = BareSocket(url, data), redis.Redis.from_url(url, protocol=2)

    async def make_room() -> None:
        await store.delete(_KEY)
        plain.unlink("bare", "plain")

    try:
        put = await _compete(
            partial(store.put, _KEY, bundle),
            bare.put,
            partial(plain.set, "plain", data.tobytes()),
            rounds,
            before=make_room,
        )
        get = await _compete(partial(_get, store), bare.get, partial(plain.get, "plain"), rounds)
        found = await store.look_up(_KEY)
        assert found is not None
        fetch = await _compete(
            partial(store.fetch, found.manifest), bare.get, partial(plain.get, "plain"), rounds
        )
    finally:
        bare.close()
        plain.flushall()
        plain.close()
    ways: dict[Way, Mapping[str, list[float]]] = {"put": put, "get": get, "fetch": fetch}
    return {way: _speeds(seconds, len(data)) for way, seconds in ways.items()}


async def _compete(
    ours: Move, ceiling: Move, redis_py: Move, rounds: int, *, before: Move | None = None
) -> Mapping[str, list[float]]:
    """Seconds of each, round by round; `before` is done before each round and not timed."""
    moves = (("ours", ours), ("ceiling", ceiling), ("redis_py", redis_py))
    seconds: dict[str, list[float]] = {name: [] for name, _ in moves}
    for turn in range(_FIRST_ROUNDS + rounds):
        if before is not None:
            await before()
        # Each second round goes backwards: everybody finds the caches as his predecessor left them.
        for name, move in moves if turn % 2 else reversed(moves):
            start = time.perf_counter()
            if name == "ours":
                await move()
            else:
                move()
            if turn >= _FIRST_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _speeds(seconds: Mapping[str, list[float]], size: int) -> Speeds:
    return Speeds(**{name: size / _MEGABYTE / statistics.median(each) for name, each in seconds.items()})


async def _get(store: FeatureStore) -> None:
    found = await store.look_up(_KEY)
    assert found is not None
    assert await store.fetch(found.manifest) is not None


def _open(url: str) -> FeatureStore:
    """As the services open it by default."""
    fields = SharedSettings.model_fields
    return open_feature_store(
        url=url,
        fingerprint="f" * 64,
        ttl_seconds=fields["store_ttl_seconds"].default,
        timeout_seconds=10,
        connections=fields["store_connections"].default,
        chunk_bytes=fields["store_chunk_bytes"].default,
    )


def _feature(megabytes: int) -> FeatureBundle:
    """A bfloat16 feature of this size in MiB, of random values."""
    rows = megabytes * 1024 * 1024 // _BYTES_A_ROW
    values = np.random.default_rng(7).standard_normal((rows, _BYTES_A_ROW // 2), dtype=np.float32)
    tensor = torch.from_numpy(values).to(torch.bfloat16)
    return FeatureBundle(Modality.IMAGE, Grid(1, 2, 2 * rows), tensor, _BYTES_A_ROW // 8, 3)
