"""Bytes on their way to and from real servers: exact with either parser, awaited in line, gone in between."""

import asyncio
import random
from typing import Any

import pytest
from prometheus_client import REGISTRY
from redis._parsers import _HiredisParser, _RESP2Parser

from shared.store.names import chunk_names, manifest_name
from shared.store.redis_socket import RedisSocket
from shared.store.redis_url import parse_store_url
from tests.contract.backends import RedisBackend
from tests.feature_samples import make_bundle, make_key

KEY = make_key("a")


# S08
@pytest.mark.parametrize("parser", [_HiredisParser, _RESP2Parser])
def test_bytes_are_exact_with_and_without_hiredis(redis_backend: RedisBackend, parser: type[Any]) -> None:
    options = parse_store_url(redis_backend.url).options
    socket = RedisSocket({**options, "parser_class": parser}, timeout_seconds=5)
    socket.begin(5)
    values = [random.Random(seed).randbytes(1000) for seed in range(20)]
    values += [b"", b"\r\n", b"$-1\r\n", "läßt".encode("latin-1"), bytes(range(256))]
    for value in values:
        assert socket.round_trip([("SET", "x", value), ("GET", "x")]) == [b"OK", value]
    socket.close()


# S03
async def test_a_wait_for_a_connection_is_seen_in_the_metrics(redis_backend: RedisBackend) -> None:
    def waits() -> float:
        return REGISTRY.get_sample_value("lenspair_store_connection_wait_seconds_count") or 0.0

    store = redis_backend.open(connections=2)
    await store.put(KEY, make_bundle())
    before = waits()
    found = await asyncio.gather(*(store.look_up(KEY) for _ in range(100)))
    assert all(each is not None for each in found)
    assert waits() == before + 100
    await store.close()


# S09
@pytest.mark.parametrize("part", ["manifest", "chunk", "all"])
async def test_what_expires_between_look_up_and_fetch_is_a_miss(
    redis_backend: RedisBackend, part: str
) -> None:
    store = redis_backend.open()
    manifest = (await store.put(KEY, make_bundle())).manifest
    assert await store.look_up(KEY) is not None
    names = {"manifest": [manifest_name(KEY)], "chunk": chunk_names(manifest)[1:2]}
    for name in names.get(part, [manifest_name(KEY), *chunk_names(manifest)]):
        assert await redis_backend.client.pexpire(name, 1)
    await asyncio.sleep(0.01)
    assert await store.fetch(manifest) is None
    assert await store.look_up(KEY) is None
    await store.close()
