"""What every implementation of FeatureLeases keeps."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from demo.embedded_store import EmbeddedStore
from shared.features.key import FeatureKey
from shared.store.leases import FeatureLeases
from tests.contract.lease_places import LeasePlace, a_lease_place

# Far above the time-out of a test's waits: whoever is woken was not woken by the end of a lease.
MINUTE = 60.0


@pytest.fixture
async def place(shared_server: EmbeddedStore | None) -> AsyncIterator[LeasePlace]:
    place = a_lease_place(shared_server)
    yield place
    await place.close()


@pytest.fixture
def key() -> FeatureKey:
    """One that no other test has used."""
    return FeatureKey("0" * 64, "1" * 64, secrets.token_hex(32))


async def holder(leases: FeatureLeases, key: FeatureKey, token: str) -> str:
    return (await leases.take(key, token)).holder


async def is_woken(event: asyncio.Event, seconds: float = 10.0) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def test_one_holds_and_the_others_see_whom_they_wait_for(place: LeasePlace, key: FeatureKey) -> None:
    one, other = place.open(), place.open()
    assert one.seconds == 5.0
    mine = await one.take(key, "a")
    assert (mine.holder, 4.0 < mine.seconds_left <= 5.0) == ("a", True)
    seen = await other.take(key, "b")
    assert (seen.holder, 3.0 < seen.seconds_left <= 5.0) == ("a", True)
    assert await holder(one, key, "c") == "a", "one process holds it no more than another"


async def test_taking_twice_is_taking_once(place: LeasePlace, key: FeatureKey) -> None:
    """An exchange whose answer was lost is made again."""
    leases = place.open()
    assert [await holder(leases, key, "a") for _ in range(2)] == ["a", "a"]


async def test_of_many_at_once_one_holds(place: LeasePlace, key: FeatureKey) -> None:
    all_leases = [place.open() for _ in range(4)]
    takes = (holder(leases, key, f"{n}.{i}") for n, leases in enumerate(all_leases) for i in range(8))
    assert len(set(await asyncio.gather(*takes))) == 1


async def test_keys_are_apart(place: LeasePlace, key: FeatureKey) -> None:
    leases = place.open()
    other = FeatureKey("2" * 64, key.namespace, key.digest)
    assert await holder(leases, key, "a") == "a"
    assert await holder(leases, other, "b") == "b"


async def test_what_was_released_can_be_taken(place: LeasePlace, key: FeatureKey) -> None:
    one, other = place.open(), place.open()
    await one.take(key, "a")
    assert await one.release(key, "a")
    assert await holder(other, key, "b") == "b"


# S11
async def test_nobody_releases_or_renews_the_lease_of_another(place: LeasePlace, key: FeatureKey) -> None:
    one, other = place.open(0.2), place.open()
    await one.take(key, "a")
    await asyncio.sleep(0.25)
    assert await holder(other, key, "b") == "b"
    assert not await one.renew(key, "a")
    assert not await one.release(key, "a")
    seen = await one.take(key, "c")
    assert (seen.holder, seen.seconds_left > 3) == ("b", True)


async def test_a_lease_that_is_renewed_lasts(place: LeasePlace, key: FeatureKey) -> None:
    one, other = place.open(0.4), place.open()
    await one.take(key, "a")
    for _ in range(4):
        await asyncio.sleep(0.15)
        assert await one.renew(key, "a")
    assert await holder(other, key, "b") == "a"
    await asyncio.sleep(0.5)
    assert not await one.renew(key, "a")
    assert await holder(other, key, "b") == "b"


async def test_all_who_listen_are_woken_by_a_release(place: LeasePlace, key: FeatureKey) -> None:
    leader, *followers = [place.open(MINUTE) for _ in range(4)]
    await leader.take(key, "leader")

    async def follow(leases: FeatureLeases, token: str) -> bool:
        with leases.listening(key) as released:
            while (await leases.take(key, token)).holder == "leader":
                assert await is_woken(released)
                released.clear()
            return True

    waits = [
        asyncio.create_task(follow(leases, f"{n}.{i}"))
        for n, leases in enumerate(followers)
        for i in range(3)
    ]
    await asyncio.sleep(0.3)
    assert not any(wait.done() for wait in waits)
    await leader.release(key, "leader")
    assert all(await asyncio.gather(*waits))


async def test_another_keys_release_wakes_nobody(place: LeasePlace, key: FeatureKey) -> None:
    one, other = place.open(MINUTE), place.open(MINUTE)
    stranger = FeatureKey(key.tenant, key.namespace, "a" * 64)
    await one.take(key, "a")
    with other.listening(key) as released, other.listening(stranger) as strangers:
        await other.take(key, "b")
        await asyncio.sleep(0.3)  # from here on its releases are heard
        released.clear()
        strangers.clear()
        await one.release(stranger, "c")
        assert await is_woken(strangers)
        assert not released.is_set()
