"""Bundles in the memory of this process, within a bound; knows no store, and not whether they still stand.

The least recently used bundle makes room for a new one.
"""

from collections import OrderedDict
from dataclasses import dataclass

from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.metrics import CACHE_BYTES, CACHE_ENTRIES, CACHE_EVICTIONS


@dataclass(frozen=True, slots=True)
class _Entry:
    manifest: Manifest
    bundle: FeatureBundle


class BundleCache:
    """At most `max_entries` bundles of `max_bytes` together; one for each key, that of the last write read.

    A bundle is found by its whole manifest, so that it is exactly what the manifest describes. What is
    evicted while a request still uses it lives until that request lets go: such bundles are not counted here.
    """

    def __init__(self, *, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: OrderedDict[FeatureKey, _Entry] = OrderedDict()
        self._bytes = 0

    def get(self, manifest: Manifest) -> FeatureBundle | None:
        """The bundle of exactly this manifest, which is now the most recently used."""
        entry = self._entries.get(manifest.key)
        if entry is None or entry.manifest != manifest:
            return None
        self._entries.move_to_end(manifest.key)
        return entry.bundle

    def add(self, manifest: Manifest, bundle: FeatureBundle) -> None:
        """Keeps a bundle in place of what its key had; one above `max_bytes` is not kept."""
        self.drop(manifest.key)
        if bundle.size_bytes > self._max_bytes:
            return
        self._entries[manifest.key] = _Entry(manifest, bundle)
        self._count(1, bundle.size_bytes)
        while self._bytes > self._max_bytes or len(self._entries) > self._max_entries:
            self.drop(next(iter(self._entries)))
            CACHE_EVICTIONS.inc()

    def keep_only(self, key: FeatureKey, manifest: Manifest | None) -> None:
        """Drops what is kept under the key unless it is the bundle of this manifest."""
        entry = self._entries.get(key)
        if entry is not None and entry.manifest != manifest:
            self.drop(key)

    def drop(self, key: FeatureKey) -> None:
        """Forgets the bundle of a key, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(-1, -entry.bundle.size_bytes)

    def clear(self) -> None:
        """Forgets everything."""
        for key in tuple(self._entries):
            self.drop(key)

    def _count(self, entries: int, size_bytes: int) -> None:
        self._bytes += size_bytes
        CACHE_ENTRIES.inc(entries)
        CACHE_BYTES.inc(size_bytes)
