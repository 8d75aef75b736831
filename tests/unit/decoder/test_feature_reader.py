"""Keys to features: own ones are read, missing and foreign ones are named, other checkpoints' refused."""

from dataclasses import replace

import pytest

from decoder_service.feature_reader import MAX_FEATURES, FeatureReader, FeatureShape, NamedKey
from shared.errors import FeatureNotFound, FeatureRevisionMismatch, InvalidRequest, MalformedFeatureKey
from shared.features.codec import FeatureCodec
from shared.features.key import FeatureKey
from shared.store.memory import MemoryFeatureStore
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_bundle, make_key, same_bytes

FINGERPRINT = "f" * 64
TENANT = "0" * 64
SHAPE = FeatureShape(FINGERPRINT, HIDDEN_SIZE, LEVELS)


@pytest.fixture
def store() -> MemoryFeatureStore:
    codec = FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=4096, store_key=None)
    return MemoryFeatureStore(codec, ttl_seconds=60)


def _names(*texts: object) -> list[NamedKey]:
    return [NamedKey(str(text), f"parts[{index}]") for index, text in enumerate(texts)]


async def test_features_are_read_by_key(store: MemoryFeatureStore) -> None:
    keys = [make_key("a"), make_key("b")]
    bundles = [make_bundle(seed=seed) for seed in range(2)]
    for key, bundle in zip(keys, bundles, strict=True):
        await store.put(key, bundle)
    reader = FeatureReader(store, SHAPE)
    locations = await reader.look_up(_names(*keys, keys[0]), TENANT)
    fetched = await reader.fetch(locations)
    for key, bundle in zip(keys, bundles, strict=True):
        assert same_bytes(fetched[str(key)].tensor, bundle.tensor)


async def test_every_missing_key_is_named(store: MemoryFeatureStore) -> None:
    await store.put(make_key("a"), make_bundle())
    reader = FeatureReader(store, SHAPE)
    with pytest.raises(FeatureNotFound) as caught:
        await reader.look_up(_names(make_key("b"), make_key("a"), make_key("c")), TENANT)
    assert caught.value.keys == (str(make_key("b")), str(make_key("c")))


async def test_another_tenants_key_is_like_a_missing_one(store: MemoryFeatureStore) -> None:
    foreign = make_key("a", tenant="5")
    await store.put(foreign, make_bundle())
    reader = FeatureReader(store, SHAPE)
    with pytest.raises(FeatureNotFound) as caught:
        await reader.look_up(_names(foreign), TENANT)
    assert caught.value.keys == (str(foreign),)


async def test_one_request_asks_for_no_more_features_than_allowed(store: MemoryFeatureStore) -> None:
    keys = [FeatureKey(TENANT, "1" * 64, f"{index:064x}") for index in range(MAX_FEATURES + 1)]
    reader = FeatureReader(store, SHAPE)
    with pytest.raises(FeatureNotFound):  # of the same key any number
        await reader.look_up(_names(*keys[:-1], *keys[:-1]), TENANT)
    with pytest.raises(InvalidRequest) as caught:
        await reader.look_up(_names(*keys), TENANT)
    assert (type(caught.value), caught.value.field) == (InvalidRequest, f"parts[{MAX_FEATURES}]")


@pytest.mark.parametrize(
    "text", ["", "a", "../../etc/passwd", f"{make_key()}\r\nDEL x", "a" * 1_000_000, str(make_key()).upper()]
)
async def test_what_is_no_key_is_refused_by_its_field(store: MemoryFeatureStore, text: str) -> None:
    reader = FeatureReader(store, SHAPE)
    with pytest.raises(MalformedFeatureKey) as caught:
        await reader.look_up(_names(make_key(), text), TENANT)
    assert caught.value.field == "parts[1]"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, fingerprint="e" * 64),
        replace(SHAPE, hidden_size=HIDDEN_SIZE * 2),
        replace(SHAPE, deepstack_levels=LEVELS + 1),
    ],
)
async def test_features_of_another_checkpoint_are_refused(
    store: MemoryFeatureStore, shape: FeatureShape
) -> None:
    await store.put(make_key(), make_bundle())
    with pytest.raises(FeatureRevisionMismatch):
        await FeatureReader(store, shape).look_up(_names(make_key()), TENANT)


async def test_a_feature_that_goes_between_the_two_reads_is_named(store: MemoryFeatureStore) -> None:
    await store.put(make_key(), make_bundle())
    reader = FeatureReader(store, SHAPE)
    locations = await reader.look_up(_names(make_key()), TENANT)
    await store.delete(make_key())
    with pytest.raises(FeatureNotFound) as caught:
        await reader.fetch(locations)
    assert caught.value.keys == (str(make_key()),)
