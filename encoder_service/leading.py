"""Decides over all encoder processes who computes a feature: one leads under a lease, the others wait for it.

Within a process shared/single_flight.py has done so already. A lease is advice: whoever can't get one works
without, and a leader that lost its lease goes on. Nothing here knows how a feature is computed or stored.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from encoder_service import metrics
from shared.errors import StoreFull, StoreUnavailable
from shared.features.key import FeatureKey
from shared.store.leases import FeatureLeases, HeldLease
from shared.store.store import StoredFeature

LookUp = Callable[[], Awaitable[StoredFeature | None]]

# A call waits for so many leaders that leave nothing in the store, and then works without a lease: were the
# store too full to take the feature, all calls would lead one after the other.
_MOST_LEADERS = 3
_RENEWALS_PER_LEASE = 3

_ROLES: dict[metrics.LeaseEvent, str] = {
    "taken": "leader",
    "taken_over": "leader",
    "joined": "follower",
    "without": "none",
}


class Leading:
    """Who leads, by feature key."""

    def __init__(self, leases: FeatureLeases) -> None:
        self._leases = leases
        self._releasing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def turn(self, key: FeatureKey) -> AsyncIterator["Turn"]:
        """One computation's turn; whatever it took is given back behind the block, however that ends.

        Giving back delays nobody: it goes on by itself, and the caller pays for no second time-out.
        """
        turn = Turn(self._leases, key)
        try:
            yield turn
        finally:
            turn.stop_renewing()
            if turn.may_hold:
                task = asyncio.create_task(turn.release())
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Waits until everything is given back. No call may follow."""
        await asyncio.gather(*self._releasing)


class Turn:
    """One process' place in the line for one feature. `may_hold`: there may be a lease to give back."""

    def __init__(self, leases: FeatureLeases, key: FeatureKey) -> None:
        self.may_hold = False
        self._leases = leases
        self._key = key
        self._token = secrets.token_hex(16)
        self._renewing: asyncio.Task[None] | None = None
        self._is_lost = False

    async def wait(self, look_up: LookUp) -> StoredFeature | None:
        """Waits while another process leads. Returns what it stored; None: now the caller computes it.

        Raises whatever `look_up` raises; a lease that fails raises nothing.
        """
        with metrics.stage("lease") as span, self._leases.listening(self._key) as released:
            event, found = await self._line_up(look_up, released)
            metrics.LEASES.labels(event).inc()
            span.set_attribute("lenspair.lease.role", _ROLES[event])
            return found

    async def release(self) -> None:
        """Gives the lease back, if it is still this one's, and wakes all who wait."""
        with suppress(StoreUnavailable, StoreFull):  # then it ends by itself
            if not await self._leases.release(self._key, self._token):
                self._lose()

    def stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    async def _line_up(
        self, look_up: LookUp, released: asyncio.Event
    ) -> tuple[metrics.LeaseEvent, StoredFeature | None]:
        leaders: set[str] = set()
        while True:
            released.clear()
            lease = await self._try_to_take()
            if lease is None:
                return "without", None
            if lease.holder == self._token:
                self._renewing = asyncio.create_task(self._renew())
                found = await look_up()  # the one before may have stored it just now
                return ("joined" if found else "taken_over" if leaders else "taken"), found
            leaders.add(lease.holder)
            if len(leaders) > _MOST_LEADERS:
                return "without", None
            await _wait_for(released, lease.seconds_left)
            if (found := await look_up()) is not None:
                return "joined", found

    async def _try_to_take(self) -> HeldLease | None:
        self.may_hold = True  # also when the answer does not come
        try:
            lease = await self._leases.take(self._key, self._token)
        except (StoreUnavailable, StoreFull):
            return None
        self.may_hold = lease.holder == self._token
        return lease

    async def _renew(self) -> None:
        while not self._is_lost:
            await asyncio.sleep(self._leases.seconds / _RENEWALS_PER_LEASE)
            with suppress(StoreUnavailable, StoreFull):
                if not await self._leases.renew(self._key, self._token):
                    self._lose()

    def _lose(self) -> None:
        if self._renewing is not None and not self._is_lost:
            self._is_lost = True
            metrics.LEASES.labels("lost").inc()


async def _wait_for(released: asyncio.Event, seconds: float) -> None:
    started = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            await released.wait()
    except TimeoutError:  # the lease has ended, or was renewed, or its release was not heard
        pass
    finally:
        metrics.LEASE_WAIT_SECONDS.observe(time.perf_counter() - started)
