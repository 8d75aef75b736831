"""What every feature store promises of how long features live, how they go, and how they are looked at."""

from datetime import UTC, datetime, timedelta

import pytest

from shared.features.key import FeatureKey
from shared.features.seal import DamageSeal
from shared.pb.lenspair.store.v1.feature_pb2 import FeatureManifest
from shared.store.names import chunk_names, manifest_name
from shared.store.store import FeatureStore
from shared.store.survey import Survey
from tests.contract.backends import TTL_SECONDS, Backend
from tests.feature_samples import make_bundle, make_key

KEY = make_key("a")
OTHER_KEY = make_key("b")
BUNDLE_BYTES = 3072


async def times_left(backend: Backend, key: FeatureKey = KEY) -> list[float]:
    return [await backend.seconds_left(name) for name in await backend.names() if str(key) in name]


async def age(backend: Backend, share_left: float) -> None:
    for name in await backend.names():
        await backend.set_seconds_left(name, TTL_SECONDS * share_left)


# --- keep_alive -------------------------------------------------------------------------------------


async def test_a_kept_record_lives_as_long_as_was_asked_for_as_a_whole(
    backend: Backend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    await store.put(OTHER_KEY, make_bundle())
    expires_at = await store.keep_alive(KEY, 1000)
    assert expires_at is not None
    assert abs((expires_at - datetime.now(UTC)).total_seconds() - 1000) < 10
    assert min(await times_left(backend)) > 990
    assert max(await times_left(backend, OTHER_KEY)) <= TTL_SECONDS


async def test_nothing_shortens_the_life_of_a_kept_record(backend: Backend, store: FeatureStore) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await store.keep_alive(KEY, 1000)
    expires_at = await store.keep_alive(KEY, 1e-9)
    assert await store.look_up(KEY) is not None
    assert await store.fetch(manifest) is not None
    assert min(await times_left(backend)) > 990
    assert expires_at is not None
    assert (expires_at - datetime.now(UTC)).total_seconds() > 990


async def test_a_read_lengthens_a_part_that_has_less_and_shortens_none_that_has_more(
    backend: Backend, store: FeatureStore
) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await age(backend, 0.2)
    long, *others = chunk_names(manifest)
    await backend.set_seconds_left(long, 1000)
    assert await store.look_up(KEY) is not None
    assert await backend.seconds_left(long) > 990
    assert min([await backend.seconds_left(name) for name in others]) > 0.9 * TTL_SECONDS


async def test_what_is_not_there_can_not_be_kept(backend: Backend, store: FeatureStore) -> None:
    assert await store.keep_alive(KEY, 1000) is None
    manifest = (await store.put(KEY, make_bundle())).manifest
    await backend.remove(chunk_names(manifest)[1])
    assert await store.keep_alive(KEY, 1000) is None
    assert await backend.names() == []


# --- delete -----------------------------------------------------------------------------------------


async def test_overwritten_writes_go_too(backend: Backend, store: FeatureStore) -> None:
    for chunk_bytes in (96, 704, 4992):
        writer = backend.open(chunk_bytes=chunk_bytes)
        await writer.put(KEY, make_bundle())
        await writer.close()
    await store.put(OTHER_KEY, make_bundle())
    assert sum(str(KEY) in name for name in await backend.names()) >= 32 + 5 + 1 + 1
    assert await store.delete(KEY) is True
    assert [name for name in await backend.names() if str(KEY) in name] == []
    assert await store.look_up(OTHER_KEY) is not None


async def test_writes_that_never_got_a_manifest_go_too(backend: Backend, store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    await backend.remove(manifest_name(KEY))
    assert await store.delete(KEY) is False
    assert await backend.names() == []


async def test_an_old_write_is_found_after_reads_have_let_the_record_live_on(
    backend: Backend, store: FeatureStore
) -> None:
    await store.put(KEY, make_bundle())
    for _ in range(3):
        await age(backend, 0.3)
        assert await store.look_up(KEY) is not None
    await store.keep_alive(KEY, 1000)
    await store.put(KEY, make_bundle(seed=1))
    assert await store.delete(KEY) is True
    assert await backend.names() == []


async def test_a_reader_who_holds_the_manifest_meets_a_miss(store: FeatureStore) -> None:
    old = (await store.put(KEY, make_bundle())).manifest
    await store.put(KEY, make_bundle(seed=1))
    assert await store.fetch(old) is not None
    await store.delete(KEY)
    assert await store.fetch(old) is None
    assert await store.look_up(KEY) is None
    await store.put(KEY, make_bundle())
    assert await store.fetch(old) is None
    assert await store.look_up(KEY) is not None


@pytest.mark.parametrize("junk", [b"", b"junk", bytes(2 * 1024**2)])
async def test_a_damaged_record_is_deleted_whole(backend: Backend, store: FeatureStore, junk: bytes) -> None:
    await store.put(KEY, make_bundle())
    await backend.write(manifest_name(KEY), junk)
    await store.delete(KEY)
    assert await backend.names() == []


# --- describe ---------------------------------------------------------------------------------------


async def test_describe_tells_what_look_up_tells_and_leaves_no_trace(
    backend: Backend, store: FeatureStore
) -> None:
    stored = await store.put(KEY, make_bundle())
    await age(backend, 0.3)
    described = await store.describe(KEY)
    assert described is not None
    assert described.manifest == stored.manifest
    left = (described.expires_at - datetime.now(UTC)).total_seconds()
    assert 0.2 * TTL_SECONDS < left < 0.31 * TTL_SECONDS
    assert max(await times_left(backend)) < 0.31 * TTL_SECONDS


async def test_a_record_tells_when_it_was_made(store: FeatureStore) -> None:
    made = (await store.put(KEY, make_bundle())).manifest.created_at
    described = await store.describe(KEY)
    assert made is not None
    assert abs(made - datetime.now(UTC)) < timedelta(seconds=10)
    assert described is not None
    assert described.manifest.created_at == made


async def test_what_can_not_be_read_is_not_described_and_not_touched(
    backend: Backend, store: FeatureStore
) -> None:
    assert await store.describe(KEY) is None
    manifest = (await store.put(KEY, make_bundle())).manifest
    sealed = await backend.read(manifest_name(KEY))
    await backend.write(manifest_name(KEY), b"junk")
    before = await backend.names()
    assert await store.describe(KEY) is None
    await backend.write(manifest_name(KEY), sealed)
    assert await store.describe(KEY) is not None
    assert await backend.names() == before
    await backend.remove(chunk_names(manifest)[0])
    assert await store.describe(KEY) is None
    assert manifest_name(KEY) in await backend.names()


# --- survey -----------------------------------------------------------------------------------------


async def test_a_survey_counts_one_tenants_features(backend: Backend, store: FeatureStore) -> None:
    first = (await store.put(make_key("a"), make_bundle())).manifest
    last = (await store.put(make_key("b"), make_bundle())).manifest
    await store.put(make_key("b"), make_bundle())
    await store.put(make_key("c", tenant="1"), make_bundle())
    await store.keep_alive(make_key("b"), 1000)
    counted = await store.survey("0" * 64)
    assert (counted.entries, counted.size_bytes, counted.damaged) == (2, 2 * BUNDLE_BYTES, 0)
    assert counted.oldest == first.created_at
    assert counted.newest is not None
    assert last.created_at is not None
    assert counted.newest >= last.created_at
    assert counted.first_expiry is not None
    assert counted.last_expiry is not None
    assert 900 < (counted.last_expiry - counted.first_expiry).total_seconds() <= 1000
    assert counted.memory is not None
    assert counted.memory.used_bytes > 0
    assert (await store.survey("1" * 64)).entries == 1


async def test_a_survey_of_nothing_is_empty(store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    counted = await store.survey("e" * 64)
    counted.memory = None
    assert counted == Survey()


async def test_a_survey_counts_damage_and_refreshes_and_deletes_nothing(
    backend: Backend, store: FeatureStore
) -> None:
    for name in "abc":
        await store.put(make_key(name), make_bundle())
    await backend.write(manifest_name(make_key("b")), b"junk")
    await backend.write(manifest_name(make_key("c")), await backend.read(manifest_name(make_key("a"))))
    await backend.write(f"lenspair:{{{'0' * 64}.junk}}:m", b"junk")
    await backend.write(f"lenspair:{{{'0' * 64}.\xff}}:m", b"junk")
    await age(backend, 0.3)
    before = await backend.names()
    counted = await store.survey("0" * 64)
    assert (counted.entries, counted.damaged) == (1, 2)
    assert await backend.names() == before
    assert max(await times_left(backend)) < 0.31 * TTL_SECONDS


async def test_records_of_older_encoders_have_no_age(backend: Backend, store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    message = FeatureManifest.FromString((await backend.read(manifest_name(KEY)))[:-16])
    message.ClearField("created_time_ms")
    await backend.write(manifest_name(KEY), DamageSeal().close(message.SerializeToString()))
    counted = await store.survey("0" * 64)
    assert (counted.entries, counted.oldest, counted.newest) == (1, None, None)
    described = await store.describe(KEY)
    assert described is not None
    assert described.manifest.created_at is None


async def test_a_survey_of_many_counts_each_once(store: FeatureStore) -> None:
    for number in range(300):
        await store.put(FeatureKey("0" * 64, "1" * 64, f"{number:064x}"), make_bundle())
    counted = await store.survey("0" * 64)
    assert (counted.entries, counted.size_bytes) == (300, 300 * BUNDLE_BYTES)
