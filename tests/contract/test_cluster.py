"""The store in a cluster: every record lies whole on one node, and is found after its slot has moved."""

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import MovedError

from shared.errors import StoreUnavailable
from shared.features.key import FeatureKey
from shared.store.names import manifest_name
from shared.store.store import FeatureStore
from tests.contract.backends import RedisBackend
from tests.contract.cluster_servers import SLOTS, cluster, move_slot, take_slot
from tests.contract.test_sentinel import until_it_works
from tests.feature_samples import make_bundle, same_bytes
from tests.redis_servers import SERVER_KINDS

NAMES = [f"picture {number}" for number in range(40)]


@pytest.fixture(scope="module", params=SERVER_KINDS)
def ports(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    with cluster(request.param) as ports:
        yield ports


def key_of(name: str, *, tenant: str = "0") -> FeatureKey:
    return FeatureKey(tenant * 64, "1" * 64, hashlib.sha256(name.encode()).hexdigest())


def open_store(ports: list[int], **options: Any) -> FeatureStore:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return RedisBackend(f"redis://127.0.0.1:{ports[0]}").open(url=f"redis+cluster://{hosts}", **options)


async def check_read(store: FeatureStore, name: str, seed: int) -> None:
    found = await store.look_up(key_of(name))
    assert found is not None
    bundle = await store.fetch(found.manifest)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=seed).tensor)


# S13
async def test_records_spread_over_the_nodes_and_are_found(ports: list[int]) -> None:
    store = open_store(ports[:1])
    bundles = [make_bundle(seed=seed) for seed in range(len(NAMES))]
    await asyncio.gather(
        *(store.put(key_of(name), bundle) for name, bundle in zip(NAMES, bundles, strict=True))
    )
    for seed, name in enumerate(NAMES):
        await check_read(store, name, seed)
    for port in ports:
        with Redis(port=port) as node:
            assert node.dbsize() > 0
    await store.ping()
    assert await store.delete(key_of(NAMES[0]))
    assert await store.look_up(key_of(NAMES[0])) is None
    await store.close()


async def test_a_record_is_found_after_its_slot_has_moved(ports: list[int]) -> None:
    store = open_store(ports)
    key = key_of("moving")
    await store.put(key, make_bundle(seed=5))
    slot = _slot(key)
    source = next(port for port in ports if _holds(port, manifest_name(key)))
    target = next(port for port in ports if port != source)
    move_slot(slot, source, target, ports)
    await check_read(store, "moving", 5)
    await store.put(key, make_bundle(seed=6))
    await check_read(store, "moving", 6)
    assert _holds(target, manifest_name(key))
    await store.close()


async def test_a_node_that_is_not_in_the_url_any_more_is_no_trouble(ports: list[int]) -> None:
    store = open_store([1, *ports[1:]])  # nobody listens on port 1
    await store.put(key_of("b"), make_bundle(seed=7))
    await check_read(store, "b", 7)
    await store.close()


async def test_a_node_that_keeps_silent_is_asked_last(ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store([silent.getsockname()[1], *ports], timeout_seconds=1)
        await store.put(key_of("c"), make_bundle(seed=8))
        await check_read(store, "c", 8)
        await store.close()


async def test_slots_of_a_node_that_has_fallen_silent_are_found_at_their_new_one(ports: list[int]) -> None:
    """It neither answers nor closes its connections, as when its machine has lost power."""
    store = open_store(ports, timeout_seconds=0.5)
    # The first node holds the first third of the slots.
    key = next(key_of(str(n)) for n in range(999) if _slot(key_of(str(n))) < SLOTS // 3)
    await store.put(key, make_bundle(seed=9))
    with Redis(port=ports[0]) as node:
        pid = node.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        take_slot(_slot(key), ports[1], ports[1:])
        assert await until_it_works(lambda: store.look_up(key)) is None  # it was not copied
        await store.put(key, make_bundle(seed=10))
        assert _holds(ports[1], manifest_name(key))
    finally:
        os.kill(pid, signal.SIGCONT)
    await store.close()


async def test_no_node_answers() -> None:
    store = open_store([1])
    with pytest.raises(StoreUnavailable):
        await store.look_up(key_of("a"))
    await store.close()


def _slot(key: FeatureKey) -> int:
    return key_slot(manifest_name(key).encode())


def _holds(port: int, name: str) -> bool:
    with Redis(port=port) as node:
        try:
            return bool(node.exists(name))
        except MovedError:
            return False


async def test_a_survey_counts_the_features_of_all_nodes(ports: list[int]) -> None:
    store = open_store(ports)
    for name in NAMES:
        await store.put(key_of(name, tenant="9"), make_bundle())
    survey = await store.survey("9" * 64)
    assert survey.entries == len(NAMES)
    assert survey.memory is not None
    assert await store.delete(key_of(NAMES[0], tenant="9"))
    assert (await store.survey("9" * 64)).entries == len(NAMES) - 1
    await store.close()
