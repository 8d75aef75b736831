"""Opens the feature stores that the settings name, and the codec of their records."""

from pydantic import SecretStr

from shared.features.codec import FeatureCodec
from shared.settings import SharedSettings
from shared.store.redis_features import open_feature_store
from shared.store.redis_url import InvalidStoreUrl
from shared.store.store import FeatureStore
from shared.store.tenant_stores import TenantFeatureStores


def open_store(settings: SharedSettings, fingerprint: str) -> FeatureStore:
    """The store, for features of the checkpoint with this fingerprint. It connects at the first use.

    Raises:
        InvalidStoreUrl: a URL can't be used; the message names the tenant whose it is, and no URL.
    """
    common = _open(settings.store_url, settings, fingerprint)
    if not settings.tenant_store_urls:
        return common
    own = {}
    for name, url in settings.tenant_store_urls.items():
        try:
            own[name] = _open(url, settings, fingerprint)
        except InvalidStoreUrl as error:
            raise InvalidStoreUrl(f"of tenant {name}: {error}") from None
    return TenantFeatureStores(common, own)


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
