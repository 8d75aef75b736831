"""The use case of whoever looks after stored features: keep them, delete them, look at them.

Keys come from callers, and are theirs only when the tenant in them is the caller's own: any other key is
answered like one that the store does not have, and the store is not even asked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar
from weakref import WeakValueDictionary

from encoder_service.hand_over import HandOver
from encoder_service.tally import Counts, TenantTally
from shared.errors import InvalidRequest
from shared.features.key import FeatureKey
from shared.for_each import for_each
from shared.store.store import FeatureStore, StoredFeature
from shared.store.survey import Survey

T = TypeVar("T")

_KEYS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store has of a tenant, and what this encoder did for it."""

    survey: Survey
    counts: Counts


class StoredFeatures:
    """Looks after the features of one tenant at a time; results are in the order of the keys."""

    def __init__(
        self,
        *,
        store: FeatureStore,
        hand_over: HandOver,
        tally: TenantTally,
        max_keep_alive_seconds: int,
    ) -> None:
        self._store = store
        self._hand_over = hand_over
        self._tally = tally
        self._max_keep_alive_seconds = max_keep_alive_seconds
        # A tenant's walks through its whole store take turns, and wait for no other tenant's: theirs may have
        # a store of its own that does not answer.
        self._one_survey: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def keep_alive(
        self, tenant: str, keys: Sequence[FeatureKey], seconds: float
    ) -> list[datetime | None]:
        """Lets features live at least so long from now; None for those that are not there.

        Raises:
            InvalidRequest: the time is not above 0, or above the limit.
            StoreUnavailable: the store does not answer.
        """
        limit = self._max_keep_alive_seconds
        if not 0 < seconds <= limit:
            raise InvalidRequest(
                f"time_to_live must be above 0 and at most {limit} seconds",
                field="time_to_live",
                limit_seconds=str(limit),
            )
        return await _each(tenant, keys, lambda key: self._store.keep_alive(key, seconds), None)

    async def evict(self, tenant: str, keys: Sequence[FeatureKey]) -> list[bool]:
        """Deletes features; tells of each whether it was there.

        Raises:
            StoreUnavailable: the store does not answer. What this process keeps to hand it over is gone then.
        """
        return await _each(tenant, keys, self._delete, False)

    async def describe(self, tenant: str, keys: Sequence[FeatureKey]) -> list[StoredFeature | None]:
        """What is known of features; refreshes none.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        return await _each(tenant, keys, self._store.describe, None)

    async def stats(self, tenant: str) -> StoreStats:
        """Counts the features of a tenant.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        async with self._one_survey.setdefault(tenant, asyncio.Lock()):
            survey = await self._store.survey(tenant)
        return StoreStats(survey, self._tally.of(tenant))

    async def _delete(self, key: FeatureKey) -> bool:
        was_kept = self._hand_over.forget(key)
        return await self._store.delete(key) or was_kept


async def _each(
    tenant: str, keys: Sequence[FeatureKey], ask: Callable[[FeatureKey], Awaitable[T]], missing: T
) -> list[T]:
    """Asks the store once for each of the tenant's own keys, a few at a time."""
    own = list(dict.fromkeys(key for key in keys if key.tenant == tenant))
    found = dict(zip(own, await for_each(own, ask, at_once=_KEYS_AT_ONCE), strict=True))
    return [found.get(key, missing) for key in keys]
