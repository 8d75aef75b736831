"""What a process cache adds to a store, over memory and real servers: speed, and no word of its own."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY

from shared.errors import StoreUnavailable
from shared.features.manifest import Manifest
from shared.store.names import chunk_names, manifest_name
from shared.store.store import FeatureStore
from tests.contract.backends import TTL_SECONDS, Backend, RedisBackend, cached
from tests.feature_samples import make_bundle, make_key, same_bytes
from tests.redis_servers import SERVER_KINDS, start_server

KEY = make_key("a")


@pytest.fixture
async def store(cached_backend: Backend) -> AsyncIterator[FeatureStore]:
    store = cached_backend.open()
    yield store
    await store.close()


@pytest.fixture
async def another(cached_backend: Backend) -> AsyncIterator[FeatureStore]:
    """The store as another process has it."""
    store = cached_backend.open()
    yield store
    await store.close()


def read_bytes() -> float:
    return REGISTRY.get_sample_value("lenspair_store_read_bytes_total") or 0.0


async def put_and_fetch(store: FeatureStore, *, seed: int = 0) -> Manifest:
    manifest = (await store.put(KEY, make_bundle(seed=seed))).manifest
    assert await store.fetch(manifest) is not None
    return manifest


async def test_a_hot_picture_crosses_the_network_once(store: FeatureStore) -> None:
    manifest = await put_and_fetch(store)
    before = read_bytes()
    bundles = [await store.fetch(manifest) for _ in range(5)]
    assert read_bytes() == before
    assert bundles[0] is not None
    assert same_bytes(bundles[0].tensor, make_bundle().tensor)
    assert all(bundle is bundles[0] for bundle in bundles)


# C19, C21
@pytest.mark.parametrize("looks_up_first", [False, True])
async def test_what_another_process_deletes_is_not_served(
    store: FeatureStore, another: FeatureStore, looks_up_first: bool
) -> None:
    manifest = await put_and_fetch(store)
    assert await another.delete(KEY)
    if looks_up_first:
        assert await store.look_up(KEY) is None
    assert await store.fetch(manifest) is None


# C21
async def test_what_is_flushed_is_not_served_and_can_be_written_again(
    cached_backend: Backend, store: FeatureStore
) -> None:
    manifest = await put_and_fetch(store)
    for name in await cached_backend.names():
        await cached_backend.remove(name)
    assert await store.look_up(KEY) is None
    assert await store.fetch(manifest) is None
    again = (await store.put(KEY, make_bundle(seed=1))).manifest
    bundle = await store.fetch(again)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=1).tensor)


async def test_what_has_expired_is_not_served(cached_backend: Backend, store: FeatureStore) -> None:
    manifest = await put_and_fetch(store)
    for name in await cached_backend.names():
        await cached_backend.set_seconds_left(name, 0.001)
    await asyncio.sleep(0.005)
    assert await store.fetch(manifest) is None


async def test_another_write_is_another_bundle(store: FeatureStore, another: FeatureStore) -> None:
    old = await put_and_fetch(store, seed=0)
    new = (await another.put(KEY, make_bundle(seed=1))).manifest
    for manifest, seed in ((new, 1), (old, 0), (new, 1)):
        bundle = await store.fetch(manifest)
        assert bundle is not None
        assert same_bytes(bundle.tensor, make_bundle(seed=seed).tensor)


async def test_a_hit_keeps_the_whole_record_alive(cached_backend: Backend, store: FeatureStore) -> None:
    manifest = await put_and_fetch(store)
    for name in await cached_backend.names():
        await cached_backend.set_seconds_left(name, 0.4 * TTL_SECONDS)
    assert await store.fetch(manifest) is not None
    left = [await cached_backend.seconds_left(name) for name in await cached_backend.names()]
    assert len(left) >= 1 + 4
    assert min(left) > 0.9 * TTL_SECONDS


async def test_damage_in_the_store_does_not_reach_what_was_verified(
    cached_backend: Backend, store: FeatureStore, another: FeatureStore
) -> None:
    manifest = await put_and_fetch(store)
    name = chunk_names(manifest)[1]
    await cached_backend.write(name, bytes(len(await cached_backend.read(name))))
    bundle = await store.fetch(manifest)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle().tensor)
    # Whoever reads the chunk finds the damage, and that ends the record for everyone.
    assert await another.fetch(manifest) is None
    assert await store.fetch(manifest) is None


@pytest.mark.parametrize("part", ["manifest", "chunk"])
async def test_a_record_that_has_lost_a_part_is_not_served(
    cached_backend: Backend, store: FeatureStore, part: str
) -> None:
    manifest = await put_and_fetch(store)
    await cached_backend.remove(manifest_name(KEY) if part == "manifest" else chunk_names(manifest)[2])
    assert await store.fetch(manifest) is None
    assert await store.look_up(KEY) is None


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_without_the_store_the_cache_does_not_answer(kind: str) -> None:
    with start_server(kind) as server:
        backend = RedisBackend(server.url, cached)
        store = backend.open(timeout_seconds=0.5)
        manifest = await put_and_fetch(store)
        await backend.client.aclose()
        server.stop()
        with pytest.raises(StoreUnavailable):
            await store.fetch(manifest)
        await store.close()
