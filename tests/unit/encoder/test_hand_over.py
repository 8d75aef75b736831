"""What the store does not take is kept, offered to those who allow it, and stored once the store is back."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from encoder_service.hand_over import PIECE_BYTES, HandOver, HandOverMemory, HeldFeature
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Encoded, Medium, Outcome
from shared.errors import FeatureNotFound, LenspairError, StoreFull, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.codec import EncodedRecord, FeatureCodec
from shared.features.grid import Grid
from shared.features.key import FeatureKey, tenant_tag
from shared.store.memory import MemoryFeatureStore
from shared.store.store import StoredFeature
from tests.feature_samples import make_bundle, make_key
from tests.unit.encoder.harness import TENANT, Harness, an_encoder, picture
from tests.unit.encoder.samples import solid

CODEC = FeatureCodec(fingerprint="0" * 64, chunk_bytes=4096, store_key=b"a store key")


class FailingStore(MemoryFeatureStore):
    """A store that can fail; `calls` names what was asked of it."""

    def __init__(self) -> None:
        super().__init__(CODEC, ttl_seconds=60)
        self.look_up_error: LenspairError | None = None
        self.put_error: LenspairError | None = None
        self.calls: list[str] = []

    def is_down(self) -> None:
        self.look_up_error = self.put_error = StoreUnavailable("the feature store does not answer")

    def is_full(self) -> None:
        self.put_error = StoreFull("the feature store is full")

    def is_back(self) -> None:
        self.look_up_error = self.put_error = None

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        self.calls.append("look_up")
        if self.look_up_error is not None:
            raise self.look_up_error
        return await super().look_up(key)

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        self.calls.append("put")
        if self.put_error is not None:
            raise self.put_error
        return await super().put(key, bundle)


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def a_memory(*, limit_bytes: int = 1024**2, clock: Clock | None = None) -> HandOverMemory:
    return HandOverMemory(limit_bytes=limit_bytes, seconds=60, now=clock or Clock())


def a_record(name: str, *, rows: int = 8) -> tuple[EncodedRecord, FeatureBundle]:
    bundle = make_bundle(grid=Grid(1, 2, 2 * rows))
    return CODEC.encode(make_key(name), bundle), bundle


def kept(memory: HandOverMemory, name: str, *, rows: int = 8) -> HeldFeature:
    held = memory.keep(*a_record(name, rows=rows))
    assert held is not None
    return held


# --- memory -------------------------------------------------------------------------------------------


def test_memory_is_bounded_in_bytes() -> None:
    size = kept(a_memory(), "a").size_bytes
    memory = a_memory(limit_bytes=3 * size)
    for name in "abcd":
        kept(memory, name)
        assert memory.size_bytes <= 3 * size
    assert [memory.find(make_key(name)) is not None for name in "abcd"] == [False, True, True, True]


def test_what_was_handed_out_last_stays_longest() -> None:
    size = kept(a_memory(), "a").size_bytes
    memory = a_memory(limit_bytes=2 * size)
    first, _ = kept(memory, "a"), kept(memory, "b")
    memory.renew(first)
    kept(memory, "c")
    assert [memory.find(make_key(name)) is not None for name in "abc"] == [True, False, True]


def test_a_feature_above_the_limit_is_not_kept_and_drives_nothing_out() -> None:
    memory = a_memory(limit_bytes=2 * kept(a_memory(), "a").size_bytes)
    small = kept(memory, "a")
    assert memory.keep(*a_record("b", rows=64)) is None
    assert memory.find(make_key("a")) is small


def test_memory_is_bounded_in_time() -> None:
    clock = Clock()
    memory = a_memory(clock=clock)
    early = kept(memory, "a")
    clock.advance(30)
    late = kept(memory, "b")
    clock.advance(30)
    assert memory.find(make_key("a")) is None
    assert memory.find(make_key("b")) is late
    assert memory.size_bytes == late.size_bytes == early.size_bytes
    memory.renew(late)
    clock.advance(59)
    assert memory.find(make_key("b")) is late
    clock.advance(1)
    memory.purge()
    assert memory.size_bytes == 0


def test_the_same_key_again_replaces_it() -> None:
    memory = a_memory()
    kept(memory, "a")
    again = kept(memory, "a", rows=16)
    assert memory.find(make_key("a")) is again
    assert memory.size_bytes == again.size_bytes


def test_forgetting() -> None:
    memory = a_memory()
    kept(memory, "a")
    assert memory.forget(make_key("a"))
    assert not memory.forget(make_key("a"))
    assert memory.size_bytes == 0


# --- serving ------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> HandOverMemory:
    return a_memory(limit_bytes=64 * 1024**2)


@pytest.fixture
def hand_over(memory: HandOverMemory) -> HandOver:
    return HandOver(CODEC, memory, lambda key: f"source of {key}")


def test_pieces_are_all_bytes_in_order(memory: HandOverMemory) -> None:
    codec = FeatureCodec(fingerprint="0" * 64, chunk_bytes=3 * PIECE_BYTES // 2, store_key=b"a store key")
    bundle = make_bundle(grid=Grid(1, 2, 2 * 16 * 1024))
    held = memory.keep(codec.encode(make_key(), bundle), bundle)
    assert held is not None
    pieces = list(HandOver(codec, memory, str).pieces(held))
    assert b"".join(pieces) == b"".join(held.record.chunks)
    assert len(pieces) > 3
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


def test_another_tenants_feature_is_like_a_missing_one(memory: HandOverMemory, hand_over: HandOver) -> None:
    held = kept(memory, "a")
    assert hand_over.open(make_key("a"), "0" * 64) is held
    messages = []
    for key, tenant in ((make_key("a"), "5" * 64), (make_key("b"), "0" * 64)):
        with pytest.raises(FeatureNotFound) as caught:
            hand_over.open(key, tenant)
        messages.append((caught.value.message, caught.value.field))
    assert messages[0] == messages[1]
    assert messages[0][1] == "key"


def test_what_is_forgotten_is_not_read_to_its_end(memory: HandOverMemory, hand_over: HandOver) -> None:
    held = kept(memory, "a", rows=100)
    pieces = hand_over.pieces(held)
    next(pieces)
    assert hand_over.forget(make_key("a"))
    with pytest.raises(FeatureNotFound):
        next(pieces)


def test_a_reader_who_stops_holds_nothing_of_what_is_forgotten(
    memory: HandOverMemory, hand_over: HandOver
) -> None:
    held = kept(memory, "a", rows=100)
    tensor = weakref.ref(held.bundle.tensor)
    pieces = hand_over.pieces(held)
    next(pieces)
    hand_over.forget(make_key("a"))
    del held
    gc.collect()
    assert tensor() is None


# --- the flow of an encode ----------------------------------------------------------------------------


@pytest.fixture
def store() -> FailingStore:
    return FailingStore()


@asynccontextmanager
async def encoder(
    preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver | None
) -> AsyncIterator[Harness]:
    async with an_encoder(preprocessor, store=store, hand_over=hand_over) as harness:
        yield harness


def allowing(colour: str = "red", *, tenant: str = TENANT) -> Medium:
    return replace(picture(solid(colour), tenant=tenant), allow_hand_over=True)


def assert_kept(result: Encoded, hand_over: HandOver) -> None:
    key = result.feature.manifest.key
    assert result.source == f"source of {key}"
    assert hand_over.open(key, key.tenant).record.manifest == result.feature.manifest


async def test_a_store_that_is_down_is_asked_once(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver
) -> None:
    store.is_down()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        first = await harness.service.encode(allowing())
        again = await harness.service.encode(allowing())
    assert store.calls == ["look_up"] * 2  # writing would cost a second time-out
    assert (first.outcome, again.outcome) == (Outcome.ENCODED, Outcome.HIT)
    assert harness.tower.passes == [1]
    assert first.feature.manifest == again.feature.manifest
    assert_kept(again, hand_over)


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("it stopped in between")])
async def test_a_store_that_takes_no_more(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver, error: LenspairError
) -> None:
    store.put_error = error
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        first = await harness.service.encode(allowing())
        again = await harness.service.encode(allowing())
    assert (first.outcome, again.outcome) == (Outcome.ENCODED, Outcome.HIT)
    assert harness.tower.passes == [1]
    assert_kept(first, hand_over)


async def test_a_store_that_is_back_gets_it_from_memory(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver, memory: HandOverMemory
) -> None:
    store.is_down()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        offered = await harness.service.encode(allowing())
        kept_tensor = hand_over.open(offered.feature.manifest.key, TENANT).bundle.tensor
        store.is_back()
        stored = await harness.service.encode(picture(solid("red")))
        fetched = await store.fetch(stored.feature.manifest)
    assert (stored.outcome, stored.source) == (Outcome.HIT, "")
    assert harness.tower.passes == [1]
    assert fetched is not None
    assert fetched.tensor.equal(kept_tensor)
    assert memory.size_bytes == 0  # the store is the authority again


async def test_what_the_store_has_is_forgotten(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver, memory: HandOverMemory
) -> None:
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        stored = await harness.service.encode(allowing())
        memory.keep(CODEC.encode(stored.feature.manifest.key, bundle := make_bundle()), bundle)
        assert (await harness.service.encode(allowing())).outcome is Outcome.HIT
    assert memory.size_bytes == 0


@pytest.mark.parametrize("problem", ["is_down", "is_full"])
async def test_who_does_not_allow_it_gets_the_error(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver, problem: str
) -> None:
    getattr(store, problem)()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        with pytest.raises((StoreUnavailable, StoreFull)):
            await harness.service.encode(picture(solid("red")))
        assert harness.tower.passes == ([] if problem == "is_down" else [1])
        await harness.service.encode(allowing())
        with pytest.raises((StoreUnavailable, StoreFull)):  # though it is in memory by now
            await harness.service.encode(picture(solid("red")))


@pytest.mark.parametrize("problem", ["is_down", "is_full"])
async def test_without_an_address_nothing_is_kept(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, memory: HandOverMemory, problem: str
) -> None:
    getattr(store, problem)()
    async with encoder(demo_preprocessor, store, HandOver(CODEC, memory, None)) as harness:
        with pytest.raises((StoreUnavailable, StoreFull)):
            await harness.service.encode(allowing())
    assert memory.size_bytes == 0


# Each caller of one flight gets what it allows, whoever came first.
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
@pytest.mark.parametrize("problem", ["is_down", "is_full"])
async def test_callers_of_one_flight_get_what_they_allow(
    demo_preprocessor: ImagePreprocessor,
    store: FailingStore,
    hand_over: HandOver,
    order: tuple[bool, ...],
    problem: str,
) -> None:
    getattr(store, problem)()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        calls = [
            harness.service.encode(replace(picture(solid("red")), allow_hand_over=allows)) for allows in order
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert harness.tower.passes == [1]
    for allows, result in zip(order, results, strict=True):
        if allows:
            assert isinstance(result, Encoded)
            assert_kept(result, hand_over)
        else:
            assert isinstance(result, StoreUnavailable if problem == "is_down" else StoreFull)


async def test_when_those_who_allow_it_have_left_the_rest_get_the_error(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver, memory: HandOverMemory
) -> None:
    store.is_full()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        harness.tower.gate.clear()
        leaving = asyncio.create_task(harness.service.encode(allowing()))
        staying = asyncio.create_task(harness.service.encode(picture(solid("red"))))
        await asyncio.to_thread(harness.tower.entered.wait, 10)
        leaving.cancel()
        await asyncio.sleep(0)
        harness.tower.gate.set()
        with pytest.raises(StoreFull):
            await staying
    assert memory.size_bytes == 0


async def test_a_feature_larger_than_memory_is_the_stores_error(
    demo_preprocessor: ImagePreprocessor, store: FailingStore
) -> None:
    store.is_full()
    hand_over = HandOver(CODEC, a_memory(limit_bytes=10), str)
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        with pytest.raises(StoreFull):
            await harness.service.encode(allowing())


async def test_tenants_share_nothing_in_memory_either(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver
) -> None:
    store.is_down()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        results = [
            await harness.service.encode(allowing(tenant=tenant_tag(name))) for name in ("one", "another")
        ]
    assert [result.outcome for result in results] == [Outcome.ENCODED] * 2
    assert harness.tower.passes == [1, 1]


async def test_what_is_evicted_is_computed_again(
    demo_preprocessor: ImagePreprocessor, store: FailingStore, hand_over: HandOver
) -> None:
    store.is_down()
    async with encoder(demo_preprocessor, store, hand_over) as harness:
        first = await harness.service.encode(allowing())
        assert hand_over.forget(first.feature.manifest.key)
        again = await harness.service.encode(allowing())
    assert again.outcome is Outcome.ENCODED
    assert harness.tower.passes == [1, 1]


@pytest.fixture(autouse=True)
def _nobody_waits_afterwards(hand_over: HandOver) -> Iterator[None]:
    yield
    with pytest.raises(StoreFull):
        hand_over.check_wanted(make_key(), StoreFull("full"))
