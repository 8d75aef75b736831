"""Speed of the feature store beside a bare socket and plain redis-py: `make bench-store`.

All three move the same bytes to and from the same server, in turns, so that a noisy moment meets all of
them. The bare socket is the ceiling: one prepared buffer, nothing checked, nothing allocated.
"""

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis
import torch

from demo.embedded_store import EmbeddedStore
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality
from shared.settings import SharedSettings
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

MEGABYTES = (1, 8, 32, 128)
RESULTS = Path("bench/results/store.json")
KEY = FeatureKey("1" * 64, "2" * 64, "3" * 64)
Exchange = Callable[[], Awaitable[None]]
Speeds = dict[str, float]


class BareSocket:
    """SET and GET of one value by hand; the ceiling."""

    def __init__(self, url: str, data: memoryview) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(parts.path)
        else:
            self._socket = socket.create_connection((parts.hostname, parts.port))
        self._data = data
        self._buffer = memoryview(bytearray(len(data) + 64))

    def put(self) -> None:
        self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\nbare\r\n$%d\r\n" % len(self._data))
        self._socket.sendall(self._data)
        self._socket.sendall(b"\r\n")
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$4\r\nbare\r\n")
        size = len(self._data) + len(b"$%d\r\n\r\n" % len(self._data))
        held = 0
        while held < size:
            held += self._socket.recv_into(self._buffer[held:])

    def close(self) -> None:
        self._socket.close()


def feature(megabytes: int) -> FeatureBundle:
    """A feature of this size with random values."""
    rows = megabytes * 128
    values = np.random.default_rng(7).standard_normal((rows, 4096), dtype=np.float32)
    tensor = torch.from_numpy(values).to(torch.bfloat16)
    return FeatureBundle(Modality.IMAGE, Grid(1, 2, 2 * rows), tensor, 1024, 3)


async def measure(url: str, store: FeatureStore, megabytes: int) -> dict[str, Speeds]:
    """Megabytes per second by who moved them, for put and get."""
    bundle = feature(megabytes)
    data = bundle.tensor.view(torch.uint8).numpy().reshape(-1).data
    bare, plain = BareSocket(url, data), redis.Redis.from_url(url, protocol=2)
    raw = data.tobytes()
    await store.put(KEY, bundle)

    async def put() -> None:
        await store.put(KEY, bundle)

    async def get() -> None:
        found = await store.look_up(KEY)
        assert found is not None
        assert await store.fetch(found.manifest) is not None

    try:
        return {
            "put": await _speeds(
                {
                    "ours": put,
                    "ceiling": _blocking(bare.put),
                    "redis_py": _blocking(lambda: plain.set("p", raw)),
                },
                megabytes,
            ),
            "get": await _speeds(
                {"ours": get, "ceiling": _blocking(bare.get), "redis_py": _blocking(lambda: plain.get("p"))},
                megabytes,
            ),
        }
    finally:
        bare.close()
        plain.flushall()
        plain.close()


def _blocking(call: Callable[[], Any]) -> Exchange:
    async def exchange() -> None:
        await asyncio.to_thread(call)

    return exchange


async def _speeds(exchanges: dict[str, Exchange], megabytes: int) -> Speeds:
    seconds: dict[str, list[float]] = {name: [] for name in exchanges}
    for turn in range(max(8, min(60, 400 // megabytes))):
        for name, exchange in exchanges.items():
            start = time.perf_counter()
            await exchange()
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: megabytes * 1.048576 / statistics.median(times) for name, times in seconds.items()}


async def run(url: str) -> dict[int, dict[str, Speeds]]:
    """All sizes against one server."""
    store = open_feature_store(
        url=url,
        fingerprint="f" * 64,
        ttl_seconds=300,
        timeout_seconds=10,
        connections=8,
        chunk_bytes=SharedSettings.model_fields["store_chunk_bytes"].default,
    )
    try:
        return {size: await measure(url, store, size) for size in MEGABYTES}
    finally:
        await store.close()


def results_of(speeds: dict[int, dict[str, Speeds]]) -> dict[str, Speeds]:
    """The figures of the results file: ratios by size in MB."""
    return {
        f"{way}_{name}": {
            str(size): round(by_way[way]["ours"] / by_way[way][other], 3) for size, by_way in speeds.items()
        }
        for way in ("get", "put")
        for name, other in (("ceiling_share", "ceiling"), ("ratio_redis_py", "redis_py"))
    }


def main() -> None:
    with EmbeddedStore.start(port=7399) as server:
        speeds = asyncio.run(run(server.url))
    print(f"{'MB':>4} {'':4} {'ours':>8} {'ceiling':>8} {'redis-py':>8}  share of ceiling, of redis-py")
    for size, by_way in speeds.items():
        for way, by_name in by_way.items():
            ours, ceiling, plain = (by_name[name] for name in ("ours", "ceiling", "redis_py"))
            print(
                f"{size:4} {way:4} {ours:8.0f} {ceiling:8.0f} {plain:8.0f}  {ours / ceiling:.2f}"
                f" {ours / plain:.2f}"
            )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results_of(speeds), indent=2) + "\n")


if __name__ == "__main__":
    main()
