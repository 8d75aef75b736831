"""Several encoder services on one store, with fake towers: for one new picture one of them runs its tower."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from demo.embedded_store import EmbeddedStore
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Encoded, Outcome
from shared.errors import DeadlineExceeded, InvalidMedia, QueueFull, StoreUnavailable
from shared.features.key import FeatureKey
from shared.store.leases import FeatureLeases
from tests.contract.backends import Backend, bare
from tests.contract.conftest import an_empty_place
from tests.contract.lease_places import LeasePlace, a_lease_place
from tests.unit.encoder.harness import Harness, an_encoder, picture
from tests.unit.encoder.samples import encoded, noise, solid

# Whoever gets on within a test's time was not woken by the end of such a lease.
MINUTE = 60.0
RED = solid("red")

Open = Callable[..., Awaitable[Harness]]


@pytest.fixture(scope="session")
def demo_preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


@pytest.fixture
async def backend(shared_server: EmbeddedStore | None) -> AsyncIterator[Backend]:
    backend = an_empty_place(shared_server, bare)
    yield backend
    await backend.close()


@pytest.fixture
async def place(shared_server: EmbeddedStore | None) -> AsyncIterator[LeasePlace]:
    place = a_lease_place(shared_server)
    yield place
    await place.close()


@pytest.fixture
async def an_encoder_more(
    demo_preprocessor: ImagePreprocessor, backend: Backend, place: LeasePlace
) -> AsyncIterator[Open]:
    """Opens one more encoder on the same store and leases."""
    async with AsyncExitStack() as stack:

        async def opened(*, leases: FeatureLeases | None = None, max_queue_items: int = 64) -> Harness:
            store = backend.open()
            stack.push_async_callback(store.close)
            return await stack.enter_async_context(
                an_encoder(
                    demo_preprocessor,
                    store=store,
                    leases=leases or place.open(MINUTE),
                    max_queue_items=max_queue_items,
                )
            )

        yield opened


def started(encoder: Harness, data: bytes = RED, seconds: float = 20.0) -> asyncio.Task[Encoded]:
    return asyncio.create_task(encoder.service.encode(picture(data, seconds=seconds)))


async def begun(encoder: Harness, data: bytes = RED) -> asyncio.Task[Encoded]:
    """A call that is in the middle: its tower waits for the gate."""
    encoder.tower.gate.clear()
    call = started(encoder, data)
    assert await asyncio.to_thread(encoder.tower.entered.wait, 10)
    return call


async def is_waiting(call: asyncio.Task[Encoded]) -> bool:
    await asyncio.sleep(0.3)
    return not call.done()


def passes(*encoders: Harness) -> list[int]:
    return [size for encoder in encoders for size in encoder.tower.passes]


def key_of(result: Encoded) -> str:
    return str(result.feature.manifest.key)


def leases_counted(event: str) -> float:
    return REGISTRY.get_sample_value("lenspair_encoder_leases_total", {"event": event}) or 0.0


# C23
async def test_sixteen_calls_over_two_encoders_run_one_tower_once(an_encoder_more: Open) -> None:
    encoders = [await an_encoder_more(), await an_encoder_more()]
    joined = leases_counted("joined")
    results = await asyncio.gather(*(started(encoders[number % 2]) for number in range(16)))
    assert passes(*encoders) == [1]
    assert len({key_of(result) for result in results}) == 1
    assert sorted(result.outcome for result in results) == [Outcome.ENCODED] + [Outcome.JOINED] * 15
    assert leases_counted("joined") == joined + 1
    assert (await started(encoders[1])).outcome is Outcome.HIT


async def test_followers_are_woken_not_left_polling(an_encoder_more: Open, backend: Backend) -> None:
    """Leases last a minute here, and nothing else than a release ends a wait earlier."""
    leader, *others = [await an_encoder_more() for _ in range(3)]
    leading = await begun(leader)
    following = [started(other) for other in others for _ in range(4)]
    assert all([await is_waiting(call) for call in following])
    leader.tower.gate.set()
    results = await asyncio.wait_for(asyncio.gather(leading, *following), timeout=20)
    assert [result.outcome for result in results] == [Outcome.ENCODED] + [Outcome.JOINED] * 8
    assert [other.tower.passes for other in others] == [[], []]


async def test_different_pictures_wait_for_nobody(an_encoder_more: Open) -> None:
    one, other = await an_encoder_more(), await an_encoder_more()
    leading = await begun(one)
    assert (await started(other, solid("blue"))).outcome is Outcome.ENCODED
    one.tower.gate.set()
    await leading


async def test_a_leader_that_is_cancelled_gives_the_lead_away(an_encoder_more: Open) -> None:
    one, other = await an_encoder_more(), await an_encoder_more()
    taken_over = leases_counted("taken_over")
    leading = await begun(one)
    following = started(other)
    assert await is_waiting(following)
    leading.cancel()
    assert (await following).outcome is Outcome.ENCODED
    assert leases_counted("taken_over") == taken_over + 1


async def test_a_leader_that_shuts_down_gives_the_lead_away(an_encoder_more: Open) -> None:
    one, other = await an_encoder_more(), await an_encoder_more()
    leading = await begun(one)
    following = started(other)
    assert await is_waiting(following)
    await one.service.close()
    assert (await following).outcome is Outcome.ENCODED
    with pytest.raises(asyncio.CancelledError):
        await leading


async def test_a_bad_picture_fails_everybody_alike_and_holds_up_nobody(an_encoder_more: Open) -> None:
    encoders = [await an_encoder_more() for _ in range(3)]
    bad = encoded(noise(), "JPEG")[:-128]
    calls = [started(encoder, bad) for encoder in encoders for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [InvalidMedia] * 9


async def test_a_full_queue_at_the_leader_leaves_the_picture_to_others(an_encoder_more: Open) -> None:
    full, free = await an_encoder_more(max_queue_items=1), await an_encoder_more()
    busy = [await begun(full, solid("white")), started(full, solid("blue"))]
    assert await is_waiting(busy[1])
    with pytest.raises(QueueFull):
        await started(full)
    assert (await started(free)).outcome is Outcome.ENCODED
    full.tower.gate.set()
    await asyncio.gather(*busy)


# B06
async def test_a_follower_waits_no_longer_than_its_own_time(an_encoder_more: Open) -> None:
    one, other = await an_encoder_more(), await an_encoder_more()
    leading = await begun(one)
    with pytest.raises(DeadlineExceeded):
        await started(other, seconds=0.3)
    patient = started(other)
    assert await is_waiting(patient)
    one.tower.gate.set()
    assert (await patient).outcome is Outcome.JOINED
    assert (await leading).outcome is Outcome.ENCODED


async def test_a_follower_that_leaves_takes_nothing_with_it(an_encoder_more: Open, backend: Backend) -> None:
    one, other = await an_encoder_more(), await an_encoder_more()
    leading = await begun(one)
    names = await backend.names()
    following = started(other)
    assert await is_waiting(following)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert await backend.names() == names  # that the place has nobody who listens, it checks at its end
    one.tower.gate.set()
    assert (await leading).outcome is Outcome.ENCODED


async def test_nothing_stays_but_the_record(an_encoder_more: Open, backend: Backend) -> None:
    encoder = await an_encoder_more()
    result = await started(encoder)
    await encoder.service.close()
    assert not [name for name in await backend.names() if name.endswith(":l")]
    await encoder.store.delete(result.feature.manifest.key)
    assert await backend.names() == []


class NeverRenewed:
    """Leases of a process that can't reach the store in time: what it holds runs out under it."""

    def __init__(self, leases: FeatureLeases) -> None:
        self._leases = leases
        self.seconds = leases.seconds
        self.take, self.listening, self.close = leases.take, leases.listening, leases.close
        self.released: asyncio.Queue[bool] = asyncio.Queue()

    async def renew(self, key: FeatureKey, token: str) -> bool:
        raise StoreUnavailable("the feature store does not answer")

    async def release(self, key: FeatureKey, token: str) -> bool:
        was_held = await self._leases.release(key, token)
        self.released.put_nowait(was_held)
        return was_held


# S11: a lease of one second, work of three
async def test_a_lease_is_renewed_while_its_holder_works(an_encoder_more: Open, place: LeasePlace) -> None:
    one, other = [await an_encoder_more(leases=place.open(1.0)) for _ in range(2)]
    leading = await begun(one)
    following = started(other)
    await asyncio.sleep(3)
    one.tower.gate.set()
    results = await asyncio.gather(leading, following)
    assert [result.outcome for result in results] == [Outcome.ENCODED, Outcome.JOINED]
    assert other.tower.passes == []


# S11
async def test_a_lease_that_runs_out_costs_one_more_pass_and_no_foreign_lease(
    an_encoder_more: Open, place: LeasePlace
) -> None:
    unlucky = NeverRenewed(place.open(1.0))
    one, other = await an_encoder_more(leases=unlucky), await an_encoder_more(leases=place.open(1.0))
    third = await an_encoder_more(leases=place.open(1.0))
    lost = leases_counted("lost")
    leading = await begun(one)
    other.tower.gate.clear()
    taking_over = started(other)
    assert await asyncio.to_thread(other.tower.entered.wait, 10)
    one.tower.gate.set()
    first = await leading
    assert not await unlucky.released.get()
    assert leases_counted("lost") == lost + 1
    held = await place.open().take(first.feature.manifest.key, "somebody")
    assert held.holder not in ("", "somebody"), "the one that took over still holds it"
    other.tower.gate.set()
    second = await taking_over
    assert [one.tower.passes, other.tower.passes] == [[1], [1]]
    assert [first.outcome, second.outcome] == [Outcome.ENCODED] * 2
    assert key_of(first) == key_of(second)
    assert first.feature.manifest.chunk_checksums == second.feature.manifest.chunk_checksums
    assert (await started(third)).outcome is Outcome.HIT


async def test_a_leader_that_dies_is_followed_when_its_lease_ends(
    an_encoder_more: Open, place: LeasePlace, backend: Backend
) -> None:
    key = (await started(await an_encoder_more())).feature.manifest.key
    await (store := backend.open()).delete(key)
    await store.close()
    await place.open(1.0).take(key, "a process that is gone")
    encoders = [await an_encoder_more(leases=place.open(1.0)) for _ in range(3)]
    results = await asyncio.gather(*(started(encoder) for encoder in encoders for _ in range(4)))
    assert passes(*encoders) == [1]
    assert sorted(result.outcome for result in results) == [Outcome.ENCODED] + [Outcome.JOINED] * 11
