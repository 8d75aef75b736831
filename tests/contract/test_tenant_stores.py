"""Stores of single tenants: each key goes to the store of its tenant, and to no other."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from demo.embedded_store import EmbeddedStore
from shared.errors import StoreFull, StoreUnavailable
from shared.features.grid import Grid
from shared.features.key import FeatureKey, tenant_tag
from shared.settings import SharedSettings
from shared.store.open_store import open_store
from shared.store.redis_url import InvalidStoreUrl
from shared.store.store import FeatureStore
from tests.contract.backends import FINGERPRINT, RedisBackend
from tests.contract.test_feature_store import read
from tests.feature_samples import make_bundle, same_bytes
from tests.redis_servers import start_server

SHOP = FeatureKey(tenant_tag("shop"), "1" * 64, "a" * 64)
OTHER = FeatureKey(tenant_tag("other"), "1" * 64, "a" * 64)
NOBODY = FeatureKey(tenant_tag(""), "1" * 64, "a" * 64)


def settings(common: str, **own: str) -> SharedSettings:
    return SharedSettings(
        checkpoint="unused",
        store_url=SecretStr(common),
        store_timeout_seconds=0.5,
        tenant_metadata="x-tenant",
        tenant_store_urls={name: SecretStr(url) for name, url in own.items()},
    )


@pytest.fixture
async def shops_server(server: EmbeddedStore) -> AsyncIterator[EmbeddedStore]:
    """A second server, the shop's own."""
    with start_server("valkey", {"maxmemory": "8mb", "maxmemory-policy": "noeviction"}) as own:
        yield own


@pytest.fixture
async def store(server: EmbeddedStore, shops_server: EmbeddedStore) -> AsyncIterator[FeatureStore]:
    store = open_store(settings(server.url, shop=shops_server.url), FINGERPRINT)
    yield store
    await store.close()


async def names_at(server: EmbeddedStore) -> str:
    backend = RedisBackend(server.url)
    names = " ".join(await backend.names())
    await backend.client.aclose()
    return names


async def test_each_tenant_s_features_stand_in_its_own_store(
    store: FeatureStore, server: EmbeddedStore, shops_server: EmbeddedStore
) -> None:
    await store.ping()
    for seed, key in enumerate((SHOP, OTHER, NOBODY)):
        await store.put(key, make_bundle(seed=seed))
    assert str(SHOP) in await names_at(shops_server)
    assert str(SHOP) not in await names_at(server)
    assert str(OTHER) not in await names_at(shops_server)
    for seed, key in enumerate((SHOP, OTHER, NOBODY)):
        bundle = await read(store, key)
        assert bundle is not None
        assert same_bytes(bundle.tensor, make_bundle(seed=seed).tensor)
    assert await store.delete(SHOP)
    assert await store.look_up(SHOP) is None
    assert await store.look_up(OTHER) is not None


async def test_a_tenant_whose_store_is_down_hurts_no_other(
    store: FeatureStore, shops_server: EmbeddedStore
) -> None:
    await store.put(OTHER, make_bundle())
    shops_server.stop()
    with pytest.raises(StoreUnavailable):
        await store.put(SHOP, make_bundle())
    with pytest.raises(StoreUnavailable):
        await store.look_up(SHOP)
    assert await read(store, OTHER) is not None
    await store.put(NOBODY, make_bundle())


async def test_a_tenant_whose_store_is_full_hurts_no_other(store: FeatureStore) -> None:
    large = make_bundle(grid=Grid(1, 512, 512))
    assert large.size_bytes > 8 * 1024**2
    with pytest.raises(StoreFull):
        await store.put(SHOP, large)
    await store.put(OTHER, large)


async def test_a_tenant_whose_store_is_down_keeps_no_process_from_starting(
    store: FeatureStore, shops_server: EmbeddedStore
) -> None:
    shops_server.stop()
    with capture_logs() as logs:
        await store.ping()
    assert [(line["log_level"], line["tenant"]) for line in logs] == [("warning", "shop")]
    assert shops_server.url not in str(logs)


async def test_a_process_starts_only_where_the_common_store_answers(
    shops_server: EmbeddedStore, tmp_path: Path
) -> None:
    store = open_store(settings(f"unix://{tmp_path}/socket", shop=shops_server.url), FINGERPRINT)
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await store.close()


async def test_without_tenants_of_its_own_there_is_one_store(server: EmbeddedStore) -> None:
    store = open_store(settings(server.url), FINGERPRINT)
    await store.put(SHOP, make_bundle())
    await store.close()
    assert str(SHOP) in await names_at(server)


@pytest.mark.parametrize("url", ["http://:pass-word@x", "redis://:pass-word@x?decode_responses=true", ""])
def test_a_tenant_s_url_that_can_not_be_used_is_found_before_it_is_needed(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidStoreUrl, match="of tenant shop") as caught:
        open_store(settings(f"unix://{tmp_path}/socket", shop=url), FINGERPRINT)
    assert "pass-word" not in str(caught.value)
    assert caught.value.__cause__ is None
