"""What the server knows about the calls that are running: their deadlines, their tenants, their ends.

The interceptor enters a call; handlers and what they call read it through shared/rpc/deadline.py and
shared/rpc/tenant.py. It travels in a context variable, into every task that a handler starts.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Call:
    """One running call.

    `deadline` is on the event loop's clock; `tenant` is a key part, never a name; `tenant_metadata` is what
    named it, for calls that are made on behalf of this one. A quiet call is one of health or reflection,
    whose callers may stay for as long as the server.
    """

    deadline: float
    tenant: str
    timeout: asyncio.Timeout
    is_quiet: bool = False
    is_draining: bool = False
    tenant_metadata: tuple[tuple[str, str], ...] = ()

    def end_for_drain(self) -> None:
        """Ends the handler at its next await; its caller gets UNAVAILABLE."""
        if not self.is_draining and not self.timeout.expired():
            self.is_draining = True
            self.timeout.reschedule(0.0)


current_call: ContextVar[Call] = ContextVar("lenspair_call")


class RunningCalls:
    """The calls of one server that have not ended, clean-up of their handlers included."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextmanager
    def entered(self, call: Call) -> Iterator[None]:
        """Makes the call the current one until the block ends."""
        token = current_call.set(call)
        self._calls.add(call)
        self._none_left.clear()
        try:
            yield
        finally:
            current_call.reset(token)
            self._calls.remove(call)
            if not self._calls:
                self._none_left.set()

    def end(self, *, quiet_only: bool = False) -> None:
        """Ends calls with UNAVAILABLE; `quiet_only` spares all but health and reflection."""
        for call in self._calls:
            if call.is_quiet or not quiet_only:
                call.end_for_drain()

    async def ended(self, *, within_seconds: float) -> bool:
        """Waits until no call is left; False when there still is one after that time."""
        try:
            async with asyncio.timeout(within_seconds):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True
