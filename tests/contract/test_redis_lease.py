"""Leases in Redis when servers fail, or hold what is no lease; in a cluster, and behind Sentinel."""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from demo.embedded_store import EmbeddedStore
from demo.ports import free_port
from demo.sentinel_store import SentinelStore
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Outcome
from shared.errors import StoreUnavailable
from shared.features.key import FeatureKey, tenant_tag
from shared.store.leases import FeatureLeases
from shared.store.names import lease_name
from shared.store.open_store import open_feature_leases
from tests.contract.backends import RedisBackend
from tests.contract.cluster_servers import cluster
from tests.contract.lease_places import RedisLeasePlace
from tests.contract.test_feature_leases import holder, is_woken
from tests.contract.test_tenant_stores import settings
from tests.redis_servers import SERVER_KINDS, start_server
from tests.unit.encoder.harness import Harness, an_encoder, picture
from tests.unit.encoder.samples import solid

# Whoever gets on within a test's time was not woken by the end of such a lease.
MINUTE = 60.0
RED = solid("red")


def new_key(tenant: str = "") -> FeatureKey:
    return FeatureKey(tenant_tag(tenant), "1" * 64, secrets.token_hex(32))


@pytest.fixture
async def place(server: EmbeddedStore) -> AsyncIterator[RedisLeasePlace]:
    place = RedisLeasePlace(server.url, timeout_seconds=1.0)
    yield place
    await place.close()


@pytest.fixture
async def client(server: EmbeddedStore) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url, protocol=2)
    yield client
    await client.aclose()


async def check_a_release_wakes(leader: FeatureLeases, follower: FeatureLeases, key: FeatureKey) -> None:
    """Not by the message alone that a new subscription stands: the last wait begins long after that."""
    await leader.take(key, "a")
    with follower.listening(key) as released:
        assert await holder(follower, key, "b") == "a"
        await asyncio.sleep(0.5)
        released.clear()
        await leader.release(key, "a")
        assert await is_woken(released)
        assert await holder(follower, key, "b") == "b"


@pytest.mark.parametrize("spoilt", ["no end", "far end", "list"])
async def test_what_is_no_lease_keeps_nobody_waiting(
    place: RedisLeasePlace, client: Redis, spoilt: str
) -> None:
    name = lease_name(key := new_key())
    if spoilt == "list":
        await client.rpush(name, "x")
    else:
        await client.set(name, bytes(1024**2), px=None if spoilt == "no end" else 10**10)
    leases = place.open()
    with pytest.raises(StoreUnavailable):
        await leases.take(key, "a")


async def test_a_follower_hears_nothing_before_it_needs_to(place: RedisLeasePlace, client: Redis) -> None:
    leases = place.open()
    await leases.take(key := new_key(), "a")
    await leases.release(key, "a")
    assert (await client.pubsub_numsub("lenspair:released"))[0][1] == 0


async def test_the_first_wait_misses_no_release(place: RedisLeasePlace) -> None:
    """The subscription is made when the first wait has begun already."""
    leader, follower = place.open(MINUTE), place.open(MINUTE)
    await leader.take(key := new_key(), "a")
    with follower.listening(key) as released:
        assert await holder(follower, key, "b") == "a"
        await leader.release(key, "a")
        assert await is_woken(released)


async def test_a_release_that_a_broken_subscription_missed_wakes_all_the_same(
    place: RedisLeasePlace, client: Redis
) -> None:
    leader, follower = place.open(MINUTE), place.open(MINUTE)
    await check_a_release_wakes(leader, follower, new_key())
    key = new_key()
    await leader.take(key, "a")
    with follower.listening(key) as released:
        assert await holder(follower, key, "b") == "a"
        released.clear()
        assert await client.client_kill_filter(_type="pubsub") == 1
        assert await is_woken(released), "a break is a reason to look again"
        released.clear()
        await leader.release(key, "a")
        assert await is_woken(released), "and so is its end"
    await asyncio.sleep(1.5)
    await check_a_release_wakes(leader, follower, new_key())


async def test_a_user_that_may_not_subscribe_leads_and_follows_until_leases_end(
    server: EmbeddedStore, client: Redis
) -> None:
    await client.acl_setuser(
        "default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-subscribe"], reset=True
    )
    place = RedisLeasePlace(server.url)
    leader, follower = place.open(0.5), place.open(0.5)
    await leader.take(key := new_key(), "a")
    assert await holder(follower, key, "b") == "a"
    await asyncio.sleep(0.6)
    assert await holder(follower, key, "b") == "b"
    await place.close()


async def test_leases_lie_in_the_store_of_the_tenant(server: EmbeddedStore) -> None:
    with start_server("valkey") as own:
        one, other = [
            open_feature_leases(settings(server.url, shop=own.url), seconds=MINUTE) for _ in range(2)
        ]
        keys = {server.url: new_key("other"), own.url: new_key("shop")}
        for url, key in keys.items():
            await one.take(key, "a")
            async with Redis.from_url(url, protocol=2) as client:
                assert await client.keys() == [lease_name(key).encode()]
            assert await one.renew(key, "a")
            assert await one.release(key, "a")
            await check_a_release_wakes(one, other, key)
        await one.close()
        await other.close()


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_in_a_cluster_a_release_at_any_node_is_heard(kind: str) -> None:
    with cluster(kind) as ports:
        place = RedisLeasePlace(f"redis+cluster://127.0.0.1:{ports[0]}")
        leader, follower = place.open(MINUTE), place.open(MINUTE)
        await asyncio.gather(*(check_a_release_wakes(leader, follower, new_key()) for _ in range(20)))
        await place.close()


async def test_after_a_fail_over_releases_are_heard_at_the_new_master() -> None:
    with SentinelStore() as servers:
        place = RedisLeasePlace(servers.url, timeout_seconds=1.0)
        leader, follower = place.open(MINUTE), place.open(MINUTE)
        await check_a_release_wakes(leader, follower, new_key())
        servers.switch_over()
        await asyncio.sleep(3)
        await check_a_release_wakes(leader, follower, new_key())
        await place.close()


# --- encoders on a store that fails -------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


@asynccontextmanager
async def two_encoders(url: str, preprocessor: ImagePreprocessor) -> AsyncIterator[list[Harness]]:
    async with AsyncExitStack() as stack:
        place = RedisLeasePlace(url, timeout_seconds=1.0)
        stack.push_async_callback(place.close)
        encoders = []
        for _ in range(2):
            store = RedisBackend(url).open(timeout_seconds=1.0)
            stack.push_async_callback(store.close)
            encoder = an_encoder(preprocessor, store=store, leases=place.open(MINUTE))
            encoders.append(await stack.enter_async_context(encoder))
        yield encoders


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_store_that_is_killed_in_the_middle_holds_up_nobody(
    demo_preprocessor: ImagePreprocessor, kind: str
) -> None:
    port = free_port()
    with start_server(kind, port=port) as server:
        async with two_encoders(server.url, demo_preprocessor) as (leader, follower):
            leader.tower.gate.clear()
            calls = [asyncio.create_task(leader.service.encode(picture(RED)))]
            assert await asyncio.to_thread(leader.tower.entered.wait, 10)
            calls.append(asyncio.create_task(follower.service.encode(picture(RED))))
            await asyncio.sleep(0.3)
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                await calls[1]  # long before the lease of a minute ends
            leader.tower.gate.set()
            with pytest.raises(StoreUnavailable):
                await calls[0]
            with start_server(kind, port=port):
                again = await asyncio.gather(
                    *(encoder.service.encode(picture(RED)) for encoder in (leader, follower))
                )
                assert sorted(result.outcome for result in again) == [Outcome.ENCODED, Outcome.JOINED]


@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_a_store_that_comes_back_empty_costs_one_more_pass(
    demo_preprocessor: ImagePreprocessor, kind: str
) -> None:
    with start_server(kind) as server:
        async with two_encoders(server.url, demo_preprocessor) as (leader, follower):
            leader.tower.gate.clear()
            leading = asyncio.create_task(leader.service.encode(picture(RED)))
            assert await asyncio.to_thread(leader.tower.entered.wait, 10)
            backend = RedisBackend(server.url)
            await backend.close()  # it flushes
            assert (await follower.service.encode(picture(RED))).outcome is Outcome.ENCODED
            leader.tower.gate.set()
            assert (await leading).outcome is Outcome.ENCODED


async def test_what_is_no_lease_fails_no_call(
    server: EmbeddedStore, client: Redis, demo_preprocessor: ImagePreprocessor
) -> None:
    async with two_encoders(server.url, demo_preprocessor) as encoders:
        first = await encoders[0].service.encode(picture(RED))
        await encoders[0].store.delete(key := first.feature.manifest.key)
        await client.set(lease_name(key), "somebody for ever")
        results = await asyncio.gather(*(encoder.service.encode(picture(RED)) for encoder in encoders))
        assert [result.outcome for result in results] == [Outcome.ENCODED] * 2
        assert await client.get(lease_name(key)) == b"somebody for ever"
