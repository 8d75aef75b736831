"""Looks a record up on one connection: is all of it there, and how long does it live; moves no tensor.

Two exchanges with the server, because the manifest says which chunks to ask for, in one go on one thread:
parsing a manifest that somebody made as large as can be takes too long for an event loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.features.codec import MAX_MANIFEST_BYTES, FeatureCodec
from shared.features.damage import DamageCause, DamagedRecord, IncompleteRecord, UnusableRecord
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.names import chunk_names, manifest_name
from shared.store.redis_replies import NO_SUCH_NAME, WrongType, exchange_on, expected
from shared.store.redis_socket import Command, RedisSocket

# The commands that refresh a record of which so many milliseconds are left.
Refresh = Callable[[Manifest, int], list[Command]]


@dataclass(frozen=True, slots=True)
class LookUp:
    """What was found. `held` is the manifest as it stands in the store.

    `left_ms` is the time that the record lives on, refreshed if that was due. `manifest` is None where there
    is none, or none that can be read; `problem` is why a record that is there can't be used.
    """

    held: bytes | WrongType
    left_ms: int
    manifest: Manifest | None = None
    problem: UnusableRecord | None = None


def look_up(socket: RedisSocket, codec: FeatureCodec, key: FeatureKey, refresh: Refresh) -> LookUp:
    """The record of a key, refreshed if that is due."""
    name = manifest_name(key)
    held, left_ms = exchange_on(socket, [("GETRANGE", name, 0, MAX_MANIFEST_BYTES), ("PTTL", name)])
    if left_ms == NO_SUCH_NAME:
        return LookUp(held, left_ms)
    try:
        manifest = decode(codec, key, held)
    except DamagedRecord as damage:
        return LookUp(held, left_ms, problem=damage)
    names = chunk_names(manifest)
    due = refresh(manifest, left_ms)
    replies = exchange_on(socket, [*(("STRLEN", name) for name in names), *due])
    problem = _problem_of_chunks(manifest, replies)
    # What was overwritten meanwhile was not refreshed, and lives no longer than it did.
    left_ms = max(left_ms, *(expected(reply, int) for reply in replies[len(names) :]), 0)
    return LookUp(held, left_ms, manifest, problem)


def decode(codec: FeatureCodec, key: FeatureKey, held: bytes | WrongType) -> Manifest:
    """The manifest that stands in the store; raises DamagedRecord."""
    if isinstance(held, WrongType):
        raise DamagedRecord(DamageCause.WRONG_TYPE)
    return codec.decode_manifest(key, held)


def _problem_of_chunks(manifest: Manifest, replies: list[Any]) -> UnusableRecord | None:
    sizes = replies[: len(manifest.chunk_checksums)]
    if WrongType.WRONG_TYPE in sizes:
        return DamagedRecord(DamageCause.WRONG_TYPE)
    # 0: a chunk is gone, or was when it was to be refreshed, or the manifest was.
    if 0 in replies:
        return IncompleteRecord()
    try:
        manifest.check_chunk_sizes(sizes)
    except DamagedRecord as problem:
        return problem
    return None
