"""Zeroes one DeepStack level of stored features, sealed anew: a fault that only answers can show."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.store.store import FeatureStore


class StoredLevels:
    """Some features of a store, as they were when this was made."""

    def __init__(self, store: FeatureStore, bundles: dict[FeatureKey, FeatureBundle]) -> None:
        self._store = store
        self._bundles = bundles

    @classmethod
    async def read(cls, store: FeatureStore, keys: Iterable[str]) -> "StoredLevels":
        """Reads the features of `keys`, which must all be there."""
        bundles = {}
        for key in map(FeatureKey.parse, keys):
            stored = await store.look_up(key)
            assert stored is not None, "the feature has expired"
            bundle = await store.fetch(stored.manifest)
            assert bundle is not None
            bundles[key] = bundle
        return cls(store, bundles)

    @property
    def count(self) -> int:
        return max(bundle.deepstack_levels for bundle in self._bundles.values())

    @asynccontextmanager
    async def zeroed(self, level: int) -> AsyncIterator[None]:
        """Level `level` (from 0) of all the features is zero in the store until the block ends."""
        for key, bundle in self._bundles.items():
            tensor = bundle.tensor.clone()
            start = (1 + level) * bundle.hidden_size
            tensor[:, start : start + bundle.hidden_size] = 0
            await self._store.put(key, replace(bundle, tensor=tensor))
        try:
            yield
        finally:
            for key, bundle in self._bundles.items():
                await self._store.put(key, bundle)
