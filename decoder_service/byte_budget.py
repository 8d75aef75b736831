"""A bound on bytes that are held at the same time; first come, first served, in a line of limited length."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import QueueFull

RETRY_AFTER_SECONDS = 1.0


class ByteBudget:
    """Callers hold bytes up to `limit` together; who asks for more than is free waits in line.

    A single demand above the limit is served alone: it could never be served otherwise. `max_waiting`
    callers wait at the most.
    """

    def __init__(self, limit: int, *, max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._held = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        return self._held

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Waits until `size` bytes are free and holds them until the block ends. Raises as `acquire`."""
        await self.acquire(size)
        try:
            yield
        finally:
            self.release(size)

    async def acquire(self, size: int) -> None:
        """Waits until `size` bytes are free and takes them, until they are released.

        Raises:
            QueueFull: the line is full.
        """
        if not self._line and self._fits(size):
            self._held += size
            return
        if len(self._line) >= self._max_waiting:
            raise QueueFull(
                f"{len(self._line)} requests wait for their features already",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)  # the turn came in the moment of the cancellation
            else:
                self._line.remove((size, turn))
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Gives bytes back that were acquired."""
        self._held -= size
        self._admit()

    def _admit(self) -> None:
        while self._line and self._fits(self._line[0][0]):
            size, turn = self._line.popleft()
            self._held += size
            turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self._held == 0 or self._held + size <= self._limit
