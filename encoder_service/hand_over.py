"""Features that this encoder computed and the store did not take: kept for a while, handed over to decoders.

The store stays the authority: what it takes later is forgotten here. Nothing here knows how a feature is
computed, stored or sent.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from encoder_service import metrics
from shared.errors import FeatureNotFound, StoreFull, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.codec import EncodedRecord, FeatureCodec
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.features.precision import dtype_name
from shared.store.store import StoredFeature

# A little under 1 MiB: with its frame it fits into the smallest message that settings allow.
PIECE_BYTES: Final = 1024 * 1024 - 64 * 1024

StoreProblem = StoreUnavailable | StoreFull


@dataclass(slots=True, eq=False)
class HeldFeature:
    """A feature in memory. The chunks of `record` are views into the tensor of `bundle`, unless narrower."""

    record: EncodedRecord
    bundle: FeatureBundle
    expires_at: datetime

    @property
    def size_bytes(self) -> int:
        record_bytes = self.record.manifest.size_bytes + len(self.record.sealed_manifest)
        is_view = self.record.manifest.dtype == dtype_name(self.bundle.tensor)
        return record_bytes + (0 if is_view else self.bundle.size_bytes)


class HandOverMemory:
    """Features by key, bounded in bytes and time: what was kept or renewed longest ago is forgotten first."""

    def __init__(
        self,
        *,
        limit_bytes: int,
        seconds: float,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.seconds = seconds
        self._limit_bytes = limit_bytes
        self._now = now
        self._held: OrderedDict[FeatureKey, HeldFeature] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def keep(self, record: EncodedRecord, bundle: FeatureBundle) -> HeldFeature | None:
        """Keeps a feature in place of an earlier one; None when it alone is larger than the memory."""
        key = record.manifest.key
        held = HeldFeature(record, bundle, self._expiry())
        self.forget(key)
        if held.size_bytes > self._limit_bytes:
            return None
        self._held[key] = held
        self._add_bytes(held.size_bytes)
        while self._size_bytes > self._limit_bytes:
            self.forget(next(iter(self._held)))
        return held

    def find(self, key: FeatureKey) -> HeldFeature | None:
        """The feature, if it is still there."""
        self.purge()
        return self._held.get(key)

    def renew(self, held: HeldFeature) -> None:
        """Keeps a feature for the full time from now on."""
        self._held.move_to_end(held.record.manifest.key)
        held.expires_at = self._expiry()

    def forget(self, key: FeatureKey) -> bool:
        """Drops a feature, also under the hands of those who are reading it; True when there was one."""
        held = self._held.pop(key, None)
        if held is not None:
            self._add_bytes(-held.size_bytes)
        return held is not None

    def purge(self) -> None:
        """Drops what has expired; the first ones are the oldest."""
        now = self._now()
        while self._held and next(iter(self._held.values())).expires_at <= now:
            self.forget(next(iter(self._held)))

    def _expiry(self) -> datetime:
        return self._now() + timedelta(seconds=self.seconds)

    def _add_bytes(self, count: int) -> None:
        self._size_bytes += count
        metrics.HAND_OVER_BYTES.set(self._size_bytes)


class HandOver:
    """Offers features to callers when the store fails, and serves them to the decoders that come for them.

    `source_of` writes the source of a key, as shared/features/source.py describes it; without it nothing is
    ever offered.
    """

    def __init__(
        self, codec: FeatureCodec, memory: HandOverMemory, source_of: Callable[[FeatureKey], str] | None
    ) -> None:
        self._codec = codec
        self._memory = memory
        self._source_of = source_of
        self._wanted: Counter[FeatureKey] = Counter()

    @contextmanager
    def allowed(self, key: FeatureKey, *, by_caller: bool) -> Iterator[None]:
        """While the block runs, a caller waits for this key who takes a source too, if he allows it."""
        if not by_caller or self._source_of is None:
            yield
            return
        self._wanted[key] += 1
        try:
            yield
        finally:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]

    def check_wanted(self, key: FeatureKey, problem: StoreProblem) -> None:
        """Raises the problem of the store unless somebody waits who takes a source."""
        if key not in self._wanted:
            metrics.HAND_OVERS.labels("not_wanted").inc()
            raise problem

    def find(self, key: FeatureKey) -> FeatureBundle | None:
        """The tensors of a feature that is kept."""
        held = self._memory.find(key)
        return None if held is None else held.bundle

    async def offer(
        self, key: FeatureKey, bundle: FeatureBundle, problem: StoreProblem
    ) -> tuple[StoredFeature, str]:
        """Keeps a feature that the store did not take; gives it with its source.

        Raises:
            StoreUnavailable, StoreFull: the problem, when nobody takes a source or the feature is too large.
        """
        self.check_wanted(key, problem)
        assert self._source_of is not None
        held = self._memory.find(key)
        if held is not None:
            self._memory.renew(held)
        else:
            record = await asyncio.to_thread(self._codec.encode, key, bundle)
            held = self._memory.keep(record, bundle)
        if held is None:
            metrics.HAND_OVERS.labels("too_large").inc()
            raise problem
        # Memory is given back also when nobody asks any more.
        asyncio.get_running_loop().call_later(self._memory.seconds + 1, self._memory.purge)
        return StoredFeature(held.record.manifest, held.expires_at), self._source_of(key)

    def open(self, key: FeatureKey, tenant: str) -> HeldFeature:
        """A kept feature of this tenant, for `pieces`.

        Raises:
            FeatureNotFound: there is none. Another tenant's is answered alike.
        """
        held = self._memory.find(key) if key.tenant == tenant else None
        if held is None:
            raise self._missing(key)
        return held

    def pieces(self, held: HeldFeature) -> Iterator[bytes]:
        """All bytes of the chunks, in order.

        It ends when the feature is forgotten meanwhile, and holds none of it between two pieces: slow
        readers must not hold more than memory's limit.

        Raises:
            FeatureNotFound: it was forgotten.
        """
        places = [
            (index, start)
            for index, chunk in enumerate(held.record.chunks)
            for start in range(0, len(chunk), PIECE_BYTES)
        ]
        return self._pieces(held.record.manifest, places)

    def forget(self, key: FeatureKey) -> bool:
        """Drops a feature, so that nobody is handed it from now on; True when there was one."""
        return self._memory.forget(key)

    def _pieces(self, manifest: Manifest, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for index, start in places:
            yield self._piece(manifest, index, start)
        metrics.HAND_OVERS.labels("served").inc()

    def _piece(self, manifest: Manifest, index: int, start: int) -> bytes:
        held = self._memory.find(manifest.key)
        if held is None or held.record.manifest is not manifest:
            raise self._missing(manifest.key)
        return bytes(held.record.chunks[index][start : start + PIECE_BYTES])

    def _missing(self, key: FeatureKey) -> FeatureNotFound:
        metrics.HAND_OVERS.labels("missing").inc()
        return FeatureNotFound([str(key)], field="key")
