"""Where leases under test lie: in memory, or on a real server; each place opens leases as processes would."""

from contextlib import AsyncExitStack
from typing import Protocol

from demo.embedded_store import EmbeddedStore
from shared.store.leases import FeatureLeases
from shared.store.memory_leases import LeaseTable, MemoryFeatureLeases
from shared.store.redis_lease import open_leases


class LeasePlace(Protocol):
    def open(self, seconds: float = 5.0) -> FeatureLeases:
        """One more process' view of the same leases."""

    async def close(self) -> None: ...


class MemoryLeasePlace:
    def __init__(self) -> None:
        self._table = LeaseTable()

    def open(self, seconds: float = 5.0) -> FeatureLeases:
        return MemoryFeatureLeases(self._table, seconds=seconds)

    async def close(self) -> None:
        assert len(self._table.bells) == 0, "somebody still listens"


class RedisLeasePlace:
    def __init__(self, url: str, *, timeout_seconds: float = 5.0) -> None:
        self._url = url
        self._timeout_seconds = timeout_seconds
        self._opened = AsyncExitStack()

    def open(self, seconds: float = 5.0) -> FeatureLeases:
        leases = open_leases(url=self._url, seconds=seconds, timeout_seconds=self._timeout_seconds)
        self._opened.push_async_callback(leases.close)
        return leases

    async def close(self) -> None:
        await self._opened.aclose()


def a_lease_place(server: EmbeddedStore | None) -> LeasePlace:
    return MemoryLeasePlace() if server is None else RedisLeasePlace(server.url)
