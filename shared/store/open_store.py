"""Opens the feature stores that the settings name."""

from pydantic import SecretStr

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
    secret = settings.store_key
    return open_feature_store(
        url=url.get_secret_value(),
        fingerprint=fingerprint,
        ttl_seconds=settings.store_ttl_seconds,
        timeout_seconds=settings.store_timeout_seconds,
        connections=settings.store_connections,
        chunk_bytes=settings.store_chunk_bytes,
        store_key=None if secret is None else secret.get_secret_value().encode(),
        store_dtype=settings.store_dtype,
    )
