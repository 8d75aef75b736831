"""Walks over a tenant's manifests in Redis, server by server, and counts them; changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from shared.errors import StoreUnavailable
from shared.features.codec import MAX_MANIFEST_BYTES, FeatureCodec
from shared.features.damage import DamagedRecord
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.names import key_of_manifest, manifest_name, manifest_pattern
from shared.store.redis_connection import RedisConnections
from shared.store.redis_look_up import decode
from shared.store.redis_replies import NO_SUCH_NAME, WrongType, expected
from shared.store.redis_socket import Command
from shared.store.survey import StoreMemory, Survey

# Names that the server looks at in one step: about a tenth of a millisecond for it.
_STEP: Final = 500
# A manifest is some hundred bytes; a hostile one is a megabyte, and so many of them fit into memory.
_MANIFESTS_AT_ONCE: Final = 32
_MOST_DIGITS: Final = 20
_REPORT: Final[Command] = ("INFO", "memory")

# Sends commands to one server.
Ask = Callable[[Sequence[Command]], Awaitable[list[Any]]]


async def survey(connections: RedisConnections, codec: FeatureCodec, tenant: str) -> Survey:
    """Counts the features of a tenant; see FeatureStore.survey."""
    counted = Survey()
    for server in await connections.servers():
        ask = partial(connections.round_trip_at, server)
        async for keys in _keys(ask, tenant):
            for start in range(0, len(keys), _MANIFESTS_AT_ONCE):
                await _count(ask, codec, keys[start : start + _MANIFESTS_AT_ONCE], counted)
    counted.memory = await _memory(connections)
    return counted


async def _keys(ask: Ask, tenant: str) -> AsyncIterator[list[FeatureKey]]:
    """The keys of all manifests of a server, step by step, each once: SCAN itself may repeat names.

    What was seen is remembered as one number for each key, not as the key.
    """
    seen: set[int] = set()
    async for names in _names(ask, manifest_pattern(tenant)):
        found = [key_of_manifest(name.decode(errors="replace")) for name in names]
        keys = {hash(key): key for key in found if key is not None and hash(key) not in seen}
        seen |= keys.keys()
        yield list(keys.values())


async def _names(ask: Ask, pattern: str) -> AsyncIterator[list[bytes]]:
    cursor: bytes | int = 0
    while True:
        (reply,) = await ask([("SCAN", cursor, "MATCH", pattern, "COUNT", _STEP)])
        match reply:
            case [bytes(cursor), [*names]] if cursor.isdigit():
                yield [expected(name, bytes) for name in names]
            case _:
                raise StoreUnavailable("the feature store broke the protocol")
        if not cursor.strip(b"0"):
            return


async def _count(ask: Ask, codec: FeatureCodec, keys: Sequence[FeatureKey], counted: Survey) -> None:
    commands: list[Command] = []
    for key in keys:
        name = manifest_name(key)
        commands += [("GETRANGE", name, 0, MAX_MANIFEST_BYTES), ("PTTL", name)]
    replies = await ask(commands)
    now = datetime.now(UTC)
    manifests = await asyncio.to_thread(_decode_all, codec, keys, replies[0::2])
    for manifest, left_ms in zip(manifests, replies[1::2], strict=True):
        if left_ms == NO_SUCH_NAME:  # it expired since its name was seen
            continue
        if manifest is None:
            counted.damaged += 1
        else:
            counted.add(manifest, now + timedelta(milliseconds=max(0, left_ms)))


def _decode_all(
    codec: FeatureCodec, keys: Sequence[FeatureKey], held: Sequence[bytes | WrongType]
) -> list[Manifest | None]:
    return [_decode(codec, key, sealed) for key, sealed in zip(keys, held, strict=True)]


def _decode(codec: FeatureCodec, key: FeatureKey, held: bytes | WrongType) -> Manifest | None:
    with suppress(DamagedRecord):
        return decode(codec, key, held)
    return None


async def _memory(connections: RedisConnections) -> StoreMemory | None:
    """What the servers say of their memory, together; None where they do not, as some managed ones."""
    with suppress(StoreUnavailable):
        reports = [_values(report) for (report,) in await connections.round_trip_everywhere([_REPORT])]
        if all(b"used_memory" in values for values in reports):
            used = sum(values[b"used_memory"] for values in reports)
            return StoreMemory(used, sum(values.get(b"maxmemory", 0) for values in reports))
    return None


def _values(report: bytes) -> dict[bytes, int]:
    lines = (line.partition(b":") for line in report.splitlines())
    return {name: int(value) for name, _, value in lines if value.isdigit() and len(value) < _MOST_DIGITS}
