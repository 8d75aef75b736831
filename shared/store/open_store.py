"""Opens the feature stores that the settings name, the leases in them, and the codec of their records."""

from collections.abc import Callable
from typing import TypeVar

from pydantic import SecretStr

from shared.features.codec import FeatureCodec
from shared.settings import SharedSettings
from shared.store.leases import FeatureLeases
from shared.store.redis_features import open_feature_store
from shared.store.redis_lease import open_leases
from shared.store.redis_url import InvalidStoreUrl
from shared.store.store import FeatureStore
from shared.store.tenant_stores import TenantFeatureLeases, TenantFeatureStores

T = TypeVar("T")


def open_store(settings: SharedSettings, fingerprint: str) -> FeatureStore:
    """The store, for features of the checkpoint with this fingerprint. It connects at the first use.

    Raises:
        InvalidStoreUrl: a URL can't be used; the message names the tenant whose it is, and no URL.
    """
    common, own = _open_all(settings, lambda url: _open(url, settings, fingerprint))
    return TenantFeatureStores(common, own) if own else common


def open_feature_leases(settings: SharedSettings, seconds: float) -> FeatureLeases:
    """The leases in the same stores; raises like `open_store`."""

    def opened(url: SecretStr) -> FeatureLeases:
        return open_leases(
            url=url.get_secret_value(), seconds=seconds, timeout_seconds=settings.store_timeout_seconds
        )

    common, own = _open_all(settings, opened)
    return TenantFeatureLeases(common, own) if own else common


def _open_all(settings: SharedSettings, opened: Callable[[SecretStr], T]) -> tuple[T, dict[str, T]]:
    """What is opened for all tenants, and for those that have a store of their own."""
    common = opened(settings.store_url)
    own = {}
    for name, url in settings.tenant_store_urls.items():
        try:
            own[name] = opened(url)
        except InvalidStoreUrl as error:
            raise InvalidStoreUrl(f"of tenant {name}: {error}") from None
    return common, own


def _open(url: SecretStr, settings: SharedSettings, fingerprint: str) -> FeatureStore:
    return open_feature_store(
        url=url.get_secret_value(),
        fingerprint=fingerprint,
        ttl_seconds=settings.store_ttl_seconds,
        timeout_seconds=settings.store_timeout_seconds,
        connections=settings.store_connections,
        chunk_bytes=settings.store_chunk_bytes,
        store_key=settings.store_key_bytes,
        store_dtype=settings.store_dtype,
    )


def open_codec(settings: SharedSettings, fingerprint: str) -> FeatureCodec:
    """The codec of the records in those stores, for records that travel another way."""
    return FeatureCodec(
        fingerprint=fingerprint,
        chunk_bytes=settings.store_chunk_bytes,
        store_key=settings.store_key_bytes,
        store_dtype=settings.store_dtype,
    )
