"""The in-memory twin of the leases: for tests, and for one process alone."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from shared.features.key import FeatureKey
from shared.store.leases import Bells, HeldLease
from shared.store.names import lease_name


@dataclass(slots=True)
class LeaseTable:
    """Who holds what until when, and who listens: what several twins share as processes share a server."""

    held: dict[str, tuple[str, float]] = field(default_factory=dict)
    bells: Bells = field(default_factory=Bells)


class MemoryFeatureLeases:
    """FeatureLeases in a dictionary."""

    def __init__(
        self,
        table: LeaseTable | None = None,
        *,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table or LeaseTable()
        self._seconds = seconds
        self._clock = clock

    @property
    def seconds(self) -> float:
        return self._seconds

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        holder, ends_at = self._holder(key) or self._hold(key, token)
        return HeldLease(holder, ends_at - self._clock())

    async def renew(self, key: FeatureKey, token: str) -> bool:
        is_held = self._is_held(key, token)
        if is_held:
            self._hold(key, token)
        return is_held

    async def release(self, key: FeatureKey, token: str) -> bool:
        is_held = self._is_held(key, token)
        if is_held:
            del self.table.held[lease_name(key)]
        self.table.bells.ring(lease_name(key))
        return is_held

    def listening(self, key: FeatureKey) -> AbstractContextManager[asyncio.Event]:
        return self.table.bells.listening(lease_name(key))

    async def close(self) -> None:
        """There is nothing to give back."""

    def _hold(self, key: FeatureKey, token: str) -> tuple[str, float]:
        held = self.table.held[lease_name(key)] = (token, self._clock() + self._seconds)
        return held

    def _is_held(self, key: FeatureKey, token: str) -> bool:
        held = self._holder(key)
        return held is not None and held[0] == token

    def _holder(self, key: FeatureKey) -> tuple[str, float] | None:
        held = self.table.held.get(lease_name(key))
        return None if held is None or held[1] <= self._clock() else held
