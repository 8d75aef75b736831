"""What leases promise: over all processes, one computes a feature and the others wait. Knows no store.

A lease is advice, not a lock: features are stored under exact keys, and computing one twice gives the same
result. So whoever can't get a lease, or has lost one, may go on without.

Every implementation runs the conformance suite in tests/contract/.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from shared.features.key import FeatureKey

# More than any process may set: what claims to last longer is no lease.
MAX_LEASE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """Whose a lease is, and when it ends unless its holder renews it; a holder of "" has just ended."""

    holder: str
    seconds_left: float


class FeatureLeases(Protocol):
    """Leases by feature key, each held under a token that its holder has made up at random.

    `take`, `renew` and `release` raise StoreUnavailable or StoreFull when the store fails; what they were
    to do may have been done.
    """

    @property
    def seconds(self) -> float:
        """How long a lease lasts after it was taken or renewed."""

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        """Takes the lease of a key unless somebody holds it; returns who holds it now."""

    async def renew(self, key: FeatureKey, token: str) -> bool:
        """Lets the lease last its full time from now; False when it is not held under this token any more."""

    async def release(self, key: FeatureKey, token: str) -> bool:
        """Ends the lease and wakes all who listen; False when it was not held under this token any more.

        Another holder's lease stays as it is.
        """

    def listening(self, key: FeatureKey) -> AbstractContextManager[asyncio.Event]:
        """While the block runs, its event is set when a lease of the key is released, in whatever process.

        It may be set for no reason. It may also stay unset, because messages can be lost: never wait for
        longer than the lease lasts. So listen first, then take the lease, then wait.
        """

    async def close(self) -> None:
        """Gives connections back. No call is allowed afterwards."""


class Bells:
    """The events of all who listen within this process, by name."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return len(self._events)

    @contextmanager
    def listening(self, name: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        events = self._events.setdefault(name, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events:
                del self._events[name]

    def ring(self, name: str) -> None:
        for event in self._events.get(name, ()):
            event.set()

    def ring_all(self) -> None:
        for name in self._events:
            self.ring(name)
