"""Feature stores under test, and the way around them: to the names and bytes that they keep."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from redis.asyncio import Redis

from shared.features.codec import FeatureCodec
from shared.features.manifest import StoreDtype
from shared.features.moment import utc_now
from shared.store.memory import MemoryFeatureStore, MemoryValue
from shared.store.process_cache import CachedFeatureStore
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

FINGERPRINT = "f" * 64
TTL_SECONDS = 60
CHUNK_BYTES = 1008

# What stands around each store that a backend opens.
Wrap = Callable[[FeatureStore], FeatureStore]


def bare(store: FeatureStore) -> FeatureStore:
    return store


def cached(store: FeatureStore) -> FeatureStore:
    """With a process cache that has room for everything that the suite stores."""
    return CachedFeatureStore(store, max_bytes=1024**2, max_entries=100)


class Backend(Protocol):
    """A place that stores share, with a back door."""

    def open(
        self,
        *,
        store_key: bytes | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        store_dtype: StoreDtype = "model",
    ) -> FeatureStore:
        """One more store on the same values, as another process would open it."""

    async def names(self) -> list[str]: ...

    async def read(self, name: str) -> bytes: ...

    async def write(self, name: str, data: bytes) -> None:
        """Replaces the bytes and keeps the time to live."""

    async def remove(self, name: str) -> None: ...

    async def seconds_left(self, name: str) -> float: ...

    async def set_seconds_left(self, name: str, seconds: float) -> None: ...

    async def close(self) -> None: ...


class MemoryBackend:
    def __init__(self, wrap: Wrap = bare) -> None:
        self._wrap = wrap
        self._values: dict[str, MemoryValue] = {}

    def open(
        self,
        *,
        store_key: bytes | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        store_dtype: StoreDtype = "model",
    ) -> FeatureStore:
        codec = FeatureCodec(
            fingerprint=FINGERPRINT, chunk_bytes=chunk_bytes, store_key=store_key, store_dtype=store_dtype
        )
        return self._wrap(MemoryFeatureStore(codec, ttl_seconds=TTL_SECONDS, values=self._values))

    async def names(self) -> list[str]:
        return sorted(self._values)

    async def read(self, name: str) -> bytes:
        return self._values[name].data

    async def write(self, name: str, data: bytes) -> None:
        held = self._values.get(name)
        expires_at = held.expires_at if held else utc_now() + timedelta(seconds=TTL_SECONDS)
        self._values[name] = MemoryValue(data, expires_at)

    async def remove(self, name: str) -> None:
        del self._values[name]

    async def seconds_left(self, name: str) -> float:
        return (self._values[name].expires_at - utc_now()).total_seconds()

    async def set_seconds_left(self, name: str, seconds: float) -> None:
        self._values[name].expires_at = utc_now() + timedelta(seconds=seconds)

    async def close(self) -> None:
        self._values.clear()


class RedisBackend:
    def __init__(self, url: str, wrap: Wrap = bare) -> None:
        self.url = url
        self._wrap = wrap
        self.client = Redis.from_url(url, protocol=2)

    def open(
        self,
        *,
        store_key: bytes | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        store_dtype: StoreDtype = "model",
        **options: Any,
    ) -> FeatureStore:
        defaults: Mapping[str, Any] = {
            "url": self.url,
            "fingerprint": FINGERPRINT,
            "ttl_seconds": TTL_SECONDS,
            "timeout_seconds": 5,
            "connections": 4,
            "store_dtype": store_dtype,
        }
        return self._wrap(
            open_feature_store(**{**defaults, **options}, chunk_bytes=chunk_bytes, store_key=store_key)
        )

    async def names(self) -> list[str]:
        return sorted([name.decode() async for name in self.client.scan_iter()])

    async def read(self, name: str) -> bytes:
        data = await self.client.get(name)
        assert isinstance(data, bytes)
        return data

    async def write(self, name: str, data: bytes) -> None:
        await self.client.set(name, data, keepttl=True)

    async def remove(self, name: str) -> None:
        assert await self.client.delete(name) == 1

    async def seconds_left(self, name: str) -> float:
        return float(await self.client.pttl(name)) / 1000

    async def set_seconds_left(self, name: str, seconds: float) -> None:
        assert await self.client.pexpire(name, round(seconds * 1000))

    async def close(self) -> None:
        await self.client.flushall()
        await self.client.aclose()
