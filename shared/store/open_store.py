"""Opens the feature store that the settings name."""

from shared.settings import SharedSettings
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore


def open_store(settings: SharedSettings, fingerprint: str) -> FeatureStore:
    """The store, for features of the checkpoint with this fingerprint. It connects at the first use."""
    secret = settings.store_key
    return open_feature_store(
        url=settings.store_url.get_secret_value(),
        fingerprint=fingerprint,
        ttl_seconds=settings.store_ttl_seconds,
        timeout_seconds=settings.store_timeout_seconds,
        connections=settings.store_connections,
        chunk_bytes=settings.store_chunk_bytes,
        store_key=None if secret is None else secret.get_secret_value().encode(),
        store_dtype=settings.store_dtype,
    )
