"""The process cache: its bounds, one transfer for all who ask at the same time, and what it counts."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from shared.errors import StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.codec import FeatureCodec
from shared.features.grid import Grid
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.bundle_cache import BundleCache
from shared.store.memory import MemoryFeatureStore
from shared.store.process_cache import CachedFeatureStore
from shared.store.store import FeatureStore, StoredFeature
from tests.feature_samples import make_bundle, make_key, same_bytes

SMALL_BYTES = 3072


class SlowStore(MemoryFeatureStore):
    """A store in memory whose transfers wait for a gate, are counted, and may fail."""

    def __init__(self) -> None:
        super().__init__(FeatureCodec(fingerprint="f" * 64, chunk_bytes=1008), ttl_seconds=60)
        self.gate = asyncio.Event()
        self.gate.set()
        self.transfers = 0
        self.cancelled = 0
        self.error: Exception | None = None

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        if self.error is not None:
            raise self.error
        return await super().look_up(key)

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        self.transfers += 1
        bundle = await super().fetch(manifest)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return bundle


@pytest.fixture
async def slow() -> SlowStore:
    return SlowStore()


@pytest.fixture
async def store(slow: SlowStore) -> AsyncIterator[FeatureStore]:
    store = CachedFeatureStore(slow, max_bytes=3 * SMALL_BYTES, max_entries=3)
    yield store
    await store.close()


async def fill(store: FeatureStore, names: str) -> list[Manifest]:
    """Puts and fetches a small picture under each name."""
    manifests = [(await store.put(make_key(name), make_bundle())).manifest for name in names]
    for manifest in manifests:
        await store.fetch(manifest)
    return manifests


async def transfers_of(slow: SlowStore, store: FeatureStore, manifest: Manifest) -> int:
    before = slow.transfers
    assert await store.fetch(manifest) is not None
    return slow.transfers - before


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"lenspair_store_cache_{name}") or 0.0


async def settle() -> None:
    """Long enough for what needs a thread's help to reach the gate."""
    for _ in range(20):
        await asyncio.sleep(0.005)


# --- bounds -----------------------------------------------------------------------------------------


async def test_the_least_recently_used_makes_room(slow: SlowStore, store: FeatureStore) -> None:
    first, second, third = await fill(store, "abc")
    assert await transfers_of(slow, store, first) == 0  # now the second is the oldest
    await fill(store, "d")
    assert [await transfers_of(slow, store, each) for each in (first, third, second)] == [0, 0, 1]


@pytest.mark.parametrize(("max_bytes", "max_entries"), [(2 * SMALL_BYTES + 1, 100), (1024**2, 2)])
async def test_both_bounds_hold(slow: SlowStore, max_bytes: int, max_entries: int) -> None:
    store = CachedFeatureStore(slow, max_bytes=max_bytes, max_entries=max_entries)
    before = [metric(name) for name in ("bytes", "entries", "evictions_total")]
    await fill(store, "abcde")
    after = [metric(name) for name in ("bytes", "entries", "evictions_total")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2 * SMALL_BYTES, 2, 3]
    await store.close()
    assert [metric("bytes"), metric("entries")] == before[:2]


async def test_what_is_larger_than_the_bound_is_not_kept(slow: SlowStore, store: FeatureStore) -> None:
    kept = await fill(store, "ab")
    large = (await store.put(make_key("c"), make_bundle(grid=Grid(1, 32, 32)))).manifest
    assert large.size_bytes > 3 * SMALL_BYTES
    assert [await transfers_of(slow, store, large) for _ in range(2)] == [1, 1]
    assert [await transfers_of(slow, store, each) for each in kept] == [0, 0]


async def test_another_write_replaces_the_old_one(slow: SlowStore, store: FeatureStore) -> None:
    before = metric("entries")
    await fill(store, "a")
    (new,) = await fill(store, "a")
    assert metric("entries") == before + 1
    assert await transfers_of(slow, store, new) == 0


async def test_memory_is_given_back_as_soon_as_the_feature_is_known_to_be_gone(
    slow: SlowStore, store: FeatureStore
) -> None:
    before = metric("entries")
    await fill(store, "ab")
    await slow.delete(make_key("a"))
    await store.look_up(make_key("a"))
    await store.delete(make_key("b"))
    assert metric("entries") == before


# --- one transfer for all ---------------------------------------------------------------------------


async def asking(
    slow: SlowStore, store: FeatureStore, count: int
) -> tuple[Manifest, list[asyncio.Task[FeatureBundle | None]]]:
    """So many fetches of one picture, the one transfer of which waits at the gate."""
    manifest = (await store.put(make_key("a"), make_bundle())).manifest
    slow.gate.clear()
    tasks = [asyncio.create_task(store.fetch(manifest)) for _ in range(count)]
    await settle()
    return manifest, tasks


async def test_fetches_at_the_same_time_share_one_transfer(slow: SlowStore, store: FeatureStore) -> None:
    hits, misses = metric("hits_total"), metric("misses_total")
    _, tasks = await asking(slow, store, 8)
    slow.gate.set()
    bundles = await asyncio.gather(*tasks)
    assert slow.transfers == 1
    assert all(bundle is not None and same_bytes(bundle.tensor, make_bundle().tensor) for bundle in bundles)
    assert (metric("hits_total") - hits, metric("misses_total") - misses) == (7, 1)


async def test_a_fetch_that_is_cancelled_does_not_end_the_others(
    slow: SlowStore, store: FeatureStore
) -> None:
    _, (leader, *others) = await asking(slow, store, 3)
    leader.cancel()
    await settle()
    slow.gate.set()
    assert all(bundle is not None for bundle in await asyncio.gather(*others))
    assert (slow.transfers, slow.cancelled) == (1, 0)


async def test_a_transfer_ends_when_nobody_waits_for_it(slow: SlowStore, store: FeatureStore) -> None:
    manifest, tasks = await asking(slow, store, 3)
    for task in tasks:
        task.cancel()
    await settle()
    assert slow.cancelled == 1
    slow.gate.set()
    assert await transfers_of(slow, store, manifest) == 1


async def test_a_transfer_that_fails_fails_all_and_leaves_nothing(
    slow: SlowStore, store: FeatureStore
) -> None:
    manifest, tasks = await asking(slow, store, 3)
    slow.error = StoreUnavailable("the feature store does not answer")
    slow.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
    slow.error = None
    assert await transfers_of(slow, store, manifest) == 1


async def test_who_joins_a_transfer_after_the_deletion_gets_nothing(
    slow: SlowStore, store: FeatureStore
) -> None:
    manifest, (leader,) = await asking(slow, store, 1)
    await slow.delete(manifest.key)
    follower = asyncio.create_task(store.fetch(manifest))
    await settle()
    slow.gate.set()
    assert await leader is not None  # asked before the deletion
    assert await follower is None


async def test_a_manifest_that_differs_in_anything_finds_nothing(store: FeatureStore) -> None:
    """Whoever can write to a store without a store key may use a write id again."""
    (manifest,) = await fill(store, "a")
    cache = BundleCache(max_bytes=SMALL_BYTES, max_entries=1)
    cache.add(manifest, make_bundle())
    assert cache.get(replace(manifest, grid=Grid(1, 4, 16))) is None
    assert cache.get(replace(manifest)) is not None
