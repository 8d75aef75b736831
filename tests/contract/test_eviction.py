"""A store that is smaller than what is written to it: features go, and nothing else happens."""

import pytest

from shared.features.grid import Grid
from shared.features.key import FeatureKey
from shared.store.store import FeatureStore
from tests.contract.backends import RedisBackend, Wrap, bare, cached
from tests.contract.test_feature_store import read
from tests.feature_samples import make_bundle, same_bytes
from tests.redis_servers import SERVER_KINDS, start_server

PICTURES = 200
BEHIND = 20
GRID = Grid(1, 144, 152)  # a little over 1 MB


def key_of(number: int) -> FeatureKey:
    return FeatureKey("0" * 64, "1" * 64, f"{number:064x}")


async def read_or_encode_again(store: FeatureStore, number: int) -> bool:
    """As a caller of the pair does it; True when the store still had the feature.

    What is written just now may go at once: values of one second are of one age to a server, and a read
    takes memory of its own.
    """
    bundle = await read(store, key_of(number))
    was_there = bundle is not None
    for _ in range(4):
        if bundle is None:
            await store.put(key_of(number), make_bundle(seed=number, grid=GRID))
            bundle = await read(store, key_of(number))
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=number, grid=GRID).tensor)
    return was_there


# C22
@pytest.mark.parametrize("wrap", [bare, cached])
@pytest.mark.parametrize("kind", SERVER_KINDS)
async def test_more_pictures_than_the_store_holds_and_a_slow_reader(kind: str, wrap: Wrap) -> None:
    with start_server(kind, {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}) as server:
        backend = RedisBackend(server.url, wrap)
        writer, reader = backend.open(chunk_bytes=512 * 1024), backend.open(chunk_bytes=512 * 1024)
        in_time = []
        for number in range(PICTURES):
            await writer.put(key_of(number), make_bundle(seed=number, grid=GRID))
            if number >= BEHIND:
                in_time.append(await read_or_encode_again(reader, number - BEHIND))
        # Servers know the age of values by the second, so which ones go in a short test is their choice.
        assert any(in_time)
        left = [number for number in range(PICTURES) if await reader.look_up(key_of(number)) is not None]
        assert 0 < len(left) < 64
        for store in (writer, reader):
            await store.close()
        await backend.client.aclose()
