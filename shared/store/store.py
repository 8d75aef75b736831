"""What a feature store promises; knows no store.

Every implementation runs the conformance suite in tests/contract/.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.survey import Survey


@dataclass(frozen=True, slots=True)
class StoredFeature:
    """A feature that is complete in the store, and when the store forgets it unless it is read before."""

    manifest: Manifest
    expires_at: datetime


class FeatureStore(Protocol):
    """Features under exact keys, with a time to live that every read refreshes for the whole record.

    A feature is visible only when it is complete. What is found damaged, or under a wrong key, is
    deleted, counted, and answered as a miss; it never raises. Every method may raise StoreUnavailable
    when the store does not answer within its time-out; `put` may raise StoreFull.
    """

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        """The manifest, if it and every chunk are there in their full size. Moves no tensor."""

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        """The tensors of a manifest from `look_up`, all checksums and values verified.

        None when the record is gone, or a part of it, or when it is damaged.
        """

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        """Writes chunks, then the manifest, each write under names of its own.

        Writing an existing key again is harmless: later readers get the new write, readers that already
        hold the old manifest still get the old one while it lives.

        Raises:
            ValueError: the bundle contradicts itself (grid, token count, timestamps); nothing is stored.
        """

    async def delete(self, key: FeatureKey) -> bool:
        """Removes the feature, its manifest first; True when there was one. Afterwards nobody is served it.

        The chunks of overwritten and of abandoned writes go too. A `put` that is under way stores its
        feature all the same, or may leave chunks that nobody is served until their time to live is over.
        """

    async def keep_alive(self, key: FeatureKey, seconds: float) -> datetime | None:
        """Lets the whole record live at least so long from now, above 0; never shortens its life.

        Returns when the store forgets it unless it is read before; None where there is no such feature. A
        store that runs out of memory may still evict it, and a `put` that is under way gives the new
        record the usual time to live.
        """

    async def describe(self, key: FeatureKey) -> StoredFeature | None:
        """What `look_up` would answer; changes nothing, not even a time to live or a damaged record."""

    async def survey(self, tenant: str) -> Survey:
        """Counts the features of a tenant, which is a key part, and deletes nothing.

        Takes time in proportion to the whole store, in small steps between which others are served.
        Features that come or go meanwhile may be counted or not; none is counted twice.
        """

    async def ping(self) -> None:
        """Returns when the store answers."""

    async def close(self) -> None:
        """Gives connections back. No call is allowed afterwards."""
