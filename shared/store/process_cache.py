"""A feature store whose tensors cross the network once per process; knows nothing of the store behind it.

The manifest in the store stays the authority. Whatever this process holds is handed out only after the
store has said, in one small exchange, that the very same manifest still stands: a deletion counts from the
moment it is done, for every process, and the question keeps the whole record alive as any other read does.
While the store does not answer, neither does the cache.

What is held was verified when it was read. A chunk that is damaged in the store afterwards does not matter
to it; the next process that reads the chunk finds the damage and deletes the record, and with it the
manifest, which ends it here too.
"""

import math
from datetime import datetime
from functools import partial

from shared.batching import Claim
from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.single_flight import SingleFlight
from shared.store.bundle_cache import BundleCache
from shared.store.metrics import CACHE_HITS, CACHE_MISSES
from shared.store.store import FeatureStore, StoredFeature
from shared.store.survey import Survey


class CachedFeatureStore:
    """A FeatureStore around another one. Fetches of one manifest at one time share one transfer.

    Callers get the same bundle and must not write into it. Only what was fetched is kept: `put` goes
    straight to the store.
    """

    def __init__(self, store: FeatureStore, *, max_bytes: int, max_entries: int) -> None:
        self._store = store
        self._kept = BundleCache(max_bytes=max_bytes, max_entries=max_entries)
        self._transfers: SingleFlight[Manifest, FeatureBundle | None] = SingleFlight()

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        found = await self._store.look_up(key)
        self._kept.keep_only(key, None if found is None else found.manifest)
        return found

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        bundle = self._kept.get(manifest)
        if bundle is None:
            transfer = partial(self._transfer, manifest)
            bundle, is_leader = await self._transfers.run(manifest, math.inf, transfer)
            if is_leader or bundle is None:
                return bundle
        # Another call has read it, maybe before the feature was deleted or replaced.
        if await self._stands(manifest):
            CACHE_HITS.inc()
            return bundle
        CACHE_MISSES.inc()
        return await self._store.fetch(manifest)

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        return await self._store.put(key, bundle)

    async def delete(self, key: FeatureKey) -> bool:
        self._kept.drop(key)
        return await self._store.delete(key)

    async def keep_alive(self, key: FeatureKey, seconds: float) -> datetime | None:
        return await self._store.keep_alive(key, seconds)

    async def describe(self, key: FeatureKey) -> StoredFeature | None:
        return await self._store.describe(key)

    async def survey(self, tenant: str) -> Survey:
        return await self._store.survey(tenant)

    async def ping(self) -> None:
        await self._store.ping()

    async def close(self) -> None:
        await self._transfers.close()
        self._kept.clear()
        await self._store.close()

    async def _stands(self, manifest: Manifest) -> bool:
        found = await self.look_up(manifest.key)
        return found is not None and found.manifest == manifest

    async def _transfer(self, manifest: Manifest, _: Claim) -> FeatureBundle | None:
        CACHE_MISSES.inc()
        bundle = await self._store.fetch(manifest)
        if bundle is not None:
            self._kept.add(manifest, bundle)
        return bundle
