"""One computation for all who ask for the same thing at the same time, within this process.

The work belongs to a task of its own, not to the caller who came first: it goes on as long as anybody waits
for it, and is cancelled when the last one has gone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.batching import Claim

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Work = Callable[[Claim], Awaitable[V]]


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    claim: Claim
    task: asyncio.Task[V]
    num_waiters: int = 0


class SingleFlight(Generic[K, V]):
    """Running computations by key."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}
        self._tasks: set[asyncio.Task[V]] = set()

    async def run(self, key: K, deadline: float, work: Work[V]) -> tuple[V, bool]:
        """The result of the work for `key`, and whether this call began it.

        Every waiter gets the same result or the same exception. `work` is given a claim: until when anyone
        waits, and whether everybody has gone.
        """
        flight = self._flights.get(key)
        is_leader = flight is None
        if flight is None:
            flight = self._begin(key, deadline, work)
        flight.claim.extend(deadline)
        return await self._wait(key, flight), is_leader

    async def close(self) -> None:
        """Cancels what still runs and waits until it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, key: K, deadline: float, work: Work[V]) -> _Flight[V]:
        claim = Claim(deadline)

        async def fly() -> V:
            return await work(claim)

        task = asyncio.create_task(fly())
        flight = _Flight(claim, task)
        self._flights[key] = flight
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._end(key, flight))
        return flight

    async def _wait(self, key: K, flight: _Flight[V]) -> V:
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                flight.claim.cancelled = True
                flight.task.cancel()
                self._forget(key, flight)

    def _end(self, key: K, flight: _Flight[V]) -> None:
        self._tasks.discard(flight.task)
        self._forget(key, flight)
        if not flight.task.cancelled():
            flight.task.exception()  # seen, also when everybody had gone

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        # After a cancelled flight a new one may stand under the same key already.
        if self._flights.get(key) is flight:
            del self._flights[key]
