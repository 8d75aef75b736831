"""Who leads when leases fail: a lease never makes a call fail, and never holds it up for ever."""

import asyncio
import secrets

import pytest

from encoder_service.leading import Leading
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Outcome
from shared.errors import LenspairError, StoreFull, StoreUnavailable
from shared.features.key import FeatureKey
from shared.store.leases import HeldLease
from shared.store.memory_leases import LeaseTable, MemoryFeatureLeases
from shared.store.store import StoredFeature
from tests.feature_samples import make_key
from tests.unit.encoder.harness import Harness, a_store, an_encoder, picture
from tests.unit.encoder.samples import solid
from tests.unit.encoder.test_hand_over import FailingStore

MINUTE = 60.0
DOWN = StoreUnavailable("the feature store does not answer")
FULL = StoreFull("the feature store is full")
RED = solid("red")


class SteeredLeases(MemoryFeatureLeases):
    """Leases that fail as a test says; `calls` names what was asked of them."""

    def __init__(self, table: LeaseTable | None = None, *, seconds: float = MINUTE) -> None:
        super().__init__(table, seconds=seconds)
        self.take_error: LenspairError | None = None
        self.answer_is_lost = False
        self.renew_errors: list[LenspairError] = []
        self.release_gate = asyncio.Event()
        self.release_gate.set()
        self.release_error: LenspairError | None = None
        self.calls: list[str] = []

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        self.calls.append("take")
        if self.take_error is not None:
            raise self.take_error
        lease = await super().take(key, token)
        if self.answer_is_lost:
            raise DOWN
        return lease

    async def renew(self, key: FeatureKey, token: str) -> bool:
        self.calls.append("renew")
        if self.renew_errors:
            raise self.renew_errors.pop()
        return await super().renew(key, token)

    async def release(self, key: FeatureKey, token: str) -> bool:
        self.calls.append("release")
        await self.release_gate.wait()
        if self.release_error is not None:
            raise self.release_error
        return await super().release(key, token)


class EverNewHolders(MemoryFeatureLeases):
    """Leases that others hold, one after the other, and none of them stores anything."""

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        return HeldLease(secrets.token_hex(16), 0.01)


async def encode(harness: Harness) -> Outcome:
    return (await harness.service.encode(picture(RED))).outcome


@pytest.mark.parametrize("error", [DOWN, FULL])
async def test_without_a_lease_a_picture_is_encoded_all_the_same(
    demo_preprocessor: ImagePreprocessor, error: LenspairError
) -> None:
    leases = SteeredLeases()
    leases.take_error = error
    async with an_encoder(demo_preprocessor, leases=leases) as harness:
        assert await encode(harness) is Outcome.ENCODED
        assert await encode(harness) is Outcome.HIT
    assert leases.calls.count("take") == 1


async def test_a_lease_whose_answer_was_lost_is_given_back(demo_preprocessor: ImagePreprocessor) -> None:
    leases = SteeredLeases()
    leases.answer_is_lost = True
    async with an_encoder(demo_preprocessor, leases=leases) as harness:
        assert await encode(harness) is Outcome.ENCODED
    assert leases.table.held == {}


async def test_a_hit_and_a_store_that_is_down_ask_for_no_lease(demo_preprocessor: ImagePreprocessor) -> None:
    leases, store = SteeredLeases(), FailingStore()
    async with an_encoder(demo_preprocessor, store=store, leases=leases) as harness:
        await encode(harness)
        leases.calls.clear()
        assert await encode(harness) is Outcome.HIT
        store.is_down()
        with pytest.raises(StoreUnavailable):
            await encode(harness)
    assert "take" not in leases.calls


async def test_giving_a_lease_back_delays_no_answer(demo_preprocessor: ImagePreprocessor) -> None:
    leases = SteeredLeases()
    leases.release_gate.clear()
    async with an_encoder(demo_preprocessor, leases=leases) as harness:
        assert await encode(harness) is Outcome.ENCODED
        assert len(leases.table.held) == 1
        leases.release_gate.set()
    assert leases.table.held == {}


async def test_a_lease_that_can_not_be_given_back_harms_no_call(demo_preprocessor: ImagePreprocessor) -> None:
    leases = SteeredLeases()
    leases.release_error = DOWN
    async with an_encoder(demo_preprocessor, leases=leases) as harness:
        assert await encode(harness) is Outcome.ENCODED


async def test_a_renewal_that_fails_is_tried_again(demo_preprocessor: ImagePreprocessor) -> None:
    leases = SteeredLeases(seconds=0.3)
    leases.renew_errors = [DOWN]
    async with an_encoder(demo_preprocessor, leases=leases) as harness:
        harness.tower.gate.clear()
        call = asyncio.create_task(encode(harness))
        while leases.calls.count("renew") < 4:  # noqa: ASYNC110  time is what is waited for
            await asyncio.sleep(0.02)
        harness.tower.gate.set()
        assert await call is Outcome.ENCODED


async def test_a_store_that_takes_nothing_does_not_queue_all_calls_up(
    demo_preprocessor: ImagePreprocessor,
) -> None:
    async with an_encoder(demo_preprocessor, leases=EverNewHolders()) as harness:
        assert await encode(harness) is Outcome.ENCODED


async def test_what_was_stored_between_question_and_lease_is_found(
    demo_preprocessor: ImagePreprocessor,
) -> None:
    """Another process stores the feature and ends its lease after this one has looked it up in vain."""
    store, table = a_store(), LeaseTable()
    async with an_encoder(demo_preprocessor, store=store) as other:

        class Late(SteeredLeases):
            async def take(self, key: FeatureKey, token: str) -> HeldLease:
                await encode(other)
                return await super().take(key, token)

        async with an_encoder(demo_preprocessor, store=store, leases=Late(table)) as harness:
            assert await encode(harness) is Outcome.JOINED
    assert harness.tower.passes == []
    assert table.held == {}


async def test_a_follower_that_is_cancelled_leaves_nothing() -> None:
    key, table = make_key(), LeaseTable()
    leases = MemoryFeatureLeases(table, seconds=MINUTE)
    await leases.take(key, "somebody")
    leading = Leading(leases)

    async def nothing() -> StoredFeature | None:
        return None

    async def follow() -> None:
        async with leading.turn(key) as turn:
            await turn.wait(nothing)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0.05)
    assert len(table.bells) == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await leading.close()
    assert len(table.bells) == 0
    assert [holder for holder, _ in table.held.values()] == ["somebody"]
