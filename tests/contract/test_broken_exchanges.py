"""Connections that break in the middle, and servers that answer what no server should."""

import random
from pathlib import Path

import pytest

from demo.embedded_store import EmbeddedStore
from shared.features.manifest import StoreDtype
from shared.store.names import chunk_names
from tests.contract.backends import RedisBackend
from tests.contract.fake_servers import BreakingNetwork
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
    """The first attempt sees a whole chunk and breaks in the next one; then the first chunk is damaged."""
    async with network.open(tmp_path / "proxy.sock") as url:
        store = redis_backend.open(url=url, chunk_bytes=1 << 19, store_dtype="fp8")
        manifest = (await store.put(KEY, megabytes(4))).manifest

        async def damage() -> None:
            await redis_backend.client.setrange(chunk_names(manifest)[0], 5, b"\x11")

        network.breaks_after, network.on_break = 800_000, damage
        assert await store.fetch(manifest) is None
        assert network.num_broken == 1
        await store.close()
