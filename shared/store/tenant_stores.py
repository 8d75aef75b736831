"""Stores of single tenants, and leases in them, beside the one that all others share; knows no kind of store.

A tenant with a store of its own has a capacity of its own: it evicts nobody, nobody evicts it, and when its
store is full or down, only its own calls end with an error.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from datetime import datetime

import structlog

from shared.errors import StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey, tenant_tag
from shared.features.manifest import Manifest
from shared.store.leases import FeatureLeases, HeldLease
from shared.store.store import FeatureStore, StoredFeature
from shared.store.survey import Survey

_log = structlog.get_logger("lenspair.store")


class TenantFeatureStores:
    """A FeatureStore that sends each key to the store of its tenant: by its name in `own`, else `common`."""

    def __init__(self, common: FeatureStore, own: Mapping[str, FeatureStore]) -> None:
        self._common = common
        self._named = dict(own)
        self._own = {tenant_tag(name): store for name, store in own.items()}

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        return await self._of(key.tenant).look_up(key)

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        return await self._of(manifest.key.tenant).fetch(manifest)

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        return await self._of(key.tenant).put(key, bundle)

    async def delete(self, key: FeatureKey) -> bool:
        return await self._of(key.tenant).delete(key)

    async def keep_alive(self, key: FeatureKey, seconds: float) -> datetime | None:
        return await self._of(key.tenant).keep_alive(key, seconds)

    async def describe(self, key: FeatureKey) -> StoredFeature | None:
        return await self._of(key.tenant).describe(key)

    async def survey(self, tenant: str) -> Survey:
        return await self._of(tenant).survey(tenant)

    async def ping(self) -> None:
        """Returns when the common store answers; tenants whose own store does not are named in the log.

        One tenant's dead store must not keep new processes from serving all others.

        Raises:
            StoreUnavailable: the common store does not answer.
        """
        await asyncio.gather(self._common.ping(), *(_warn_if_dead(*own) for own in self._named.items()))

    async def close(self) -> None:
        """Closes all, also when one of them fails to."""
        async with AsyncExitStack() as stores:
            for store in (self._common, *self._named.values()):
                stores.push_async_callback(store.close)

    def _of(self, tenant: str) -> FeatureStore:
        return self._own.get(tenant, self._common)


async def _warn_if_dead(tenant: str, store: FeatureStore) -> None:
    try:
        await store.ping()
    except StoreUnavailable as error:
        _log.warning("a tenant's own store does not answer", tenant=tenant, cause=error.message)


class TenantFeatureLeases:
    """FeatureLeases that lie where the features of the key's tenant do."""

    def __init__(self, common: FeatureLeases, own: Mapping[str, FeatureLeases]) -> None:
        self._common = common
        self._own = {tenant_tag(name): leases for name, leases in own.items()}

    @property
    def seconds(self) -> float:
        return self._common.seconds

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        return await self._of(key).take(key, token)

    async def renew(self, key: FeatureKey, token: str) -> bool:
        return await self._of(key).renew(key, token)

    async def release(self, key: FeatureKey, token: str) -> bool:
        return await self._of(key).release(key, token)

    def listening(self, key: FeatureKey) -> AbstractContextManager[asyncio.Event]:
        return self._of(key).listening(key)

    async def close(self) -> None:
        """Closes all, also when one of them fails to."""
        async with AsyncExitStack() as stack:
            for leases in (self._common, *self._own.values()):
                stack.push_async_callback(leases.close)

    def _of(self, key: FeatureKey) -> FeatureLeases:
        return self._own.get(key.tenant, self._common)
