"""The feature store in Redis; knows how records are laid out there, and nothing of what is in them.

A record is a manifest and its chunks, all under one hash tag and with one time to live. Chunks are
written first and the manifest last: there is no feature without a manifest. Each write has names of its
own for its chunks (see shared/features/codec.py), so a reader never meets the chunks of another write;
redis_lifetime.py knows how all of them are found again.

Reads are bounded: a manifest is read with GETRANGE, because a hostile value of half a gigabyte must not
be pulled in whole, and chunks only after STRLEN has said their sizes. STRLEN it is, not EXISTS, also
because EXISTS does not count as a use: with `allkeys-lru` the chunks of a picture whose answers come
from prefix caches would be evicted while it is asked about all the time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from shared.errors import StoreFull
from shared.features.bundle import FeatureBundle
from shared.features.codec import MAX_MANIFEST_BYTES, EncodedRecord, FeatureCodec
from shared.features.damage import DamagedRecord, UnusableRecord
from shared.features.key import FeatureKey
from shared.features.manifest import FP8, Manifest, StoreDtype
from shared.store import redis_lifetime as lifetime
from shared.store import redis_scan
from shared.store.metrics import READ_BYTES, WRITTEN_BYTES, Operation, observed
from shared.store.names import chunk_names, manifest_name
from shared.store.redis_chunks import read_chunks, write_chunks
from shared.store.redis_connection import RedisConnections
from shared.store.redis_look_up import LookUp, Refresh, decode, look_up
from shared.store.redis_replies import NO_SUCH_NAME, WrongType, exchange_on, expected
from shared.store.redis_socket import Command, RedisSocket
from shared.store.store import FeatureStore, StoredFeature
from shared.store.survey import Survey

_STREAMS: Final = 2
_ONE_STREAM_BYTES: Final = 16 * 1024 * 1024

T = TypeVar("T")


def open_feature_store(
    *,
    url: str,
    fingerprint: str,
    ttl_seconds: float,
    timeout_seconds: float,
    connections: int,
    chunk_bytes: int,
    store_key: bytes | None = None,
    store_dtype: StoreDtype = "model",
) -> FeatureStore:
    """The feature store of a URL. It connects at the first use; `ping` tries it.

    Args:
        url: see shared/store/redis_url.py.
        fingerprint: that of the checkpoint whose features are written.
        ttl_seconds: time to live of a feature since its last read.
        timeout_seconds: longest wait for one answer of the store.
        connections: most connections.
        chunk_bytes: size of the values that a feature is cut into.
        store_key: seals records against forgery; None: against damage only.
        store_dtype: what is written; every dtype is read.

    Raises:
        ValueError: one of the values can't be used. The message repeats no secret.
    """
    codec = FeatureCodec(
        fingerprint=fingerprint, chunk_bytes=chunk_bytes, store_key=store_key, store_dtype=store_dtype
    )
    pool = RedisConnections.open(url, timeout_seconds=timeout_seconds, connections=connections)
    return RedisFeatureStore(pool, codec, ttl_seconds=ttl_seconds)


class RedisFeatureStore:
    """A FeatureStore in Redis."""

    def __init__(self, connections: RedisConnections, codec: FeatureCodec, *, ttl_seconds: float) -> None:
        self._connections = connections
        self._codec = codec
        self._ttl_ms = round(ttl_seconds * 1000)

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        with observed(Operation.LOOK_UP) as operation:
            looked = await self._look_up(key, self._refresh_commands)
            if looked.problem is None:
                found = self._found(looked)
                operation.hit_or_miss(found)
                return found
            operation.refused(looked.problem)
            if looked.manifest is None:
                await self._discard(key, looked.held)
            else:
                await self._discard_write(looked.manifest)
            return None

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        with observed(Operation.FETCH) as operation:
            bundle = None
            try:
                bundle = await self._read_bundle(manifest)
                operation.hit_or_miss(bundle)
            except UnusableRecord as problem:
                operation.refused(problem)
                await self._discard_write(manifest)
            return bundle

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        with observed(Operation.PUT):
            record = await asyncio.to_thread(self._codec.encode, key, bundle)
            try:
                await self._write(key, record)
            except StoreFull:
                await self._discard_write(record.manifest)
                raise
            WRITTEN_BYTES.inc(record.manifest.size_bytes)
            return StoredFeature(record.manifest, _expiry(self._ttl_ms))

    async def delete(self, key: FeatureKey) -> bool:
        with observed(Operation.DELETE):
            held, register = await self._round_trip(
                key, [("GETRANGE", manifest_name(key), 0, MAX_MANIFEST_BYTES), lifetime.read_register(key)]
            )
            members = lifetime.members(register)
            current = None
            with suppress(DamagedRecord):
                current = await asyncio.to_thread(decode, self._codec, key, held)
            removed = [
                await self._round_trip(key, commands) for commands in lifetime.removal(key, current, members)
            ]
            return bool(removed[0][0])

    async def keep_alive(self, key: FeatureKey, seconds: float) -> datetime | None:
        with observed(Operation.KEEP_ALIVE) as operation:
            left_ms = lifetime.OVERWRITTEN
            while left_ms == lifetime.OVERWRITTEN:  # by a write that came in between: keep that one
                found = await self.look_up(key)
                if found is None:
                    break
                keep = lifetime.keep(found.manifest, lifetime.milliseconds(seconds))
                (reply,) = await self._round_trip(key, [keep])
                left_ms = expected(reply, int)
            kept = _expiry(left_ms) if left_ms > lifetime.PART_IS_GONE else None
            operation.hit_or_miss(kept)
            return kept

    async def describe(self, key: FeatureKey) -> StoredFeature | None:
        with observed(Operation.DESCRIBE) as operation:
            looked = await self._look_up(key, lambda _manifest, _left_ms: [])
            found = self._found(looked) if looked.problem is None else None
            operation.hit_or_miss(found)
            return found

    async def survey(self, tenant: str) -> Survey:
        with observed(Operation.SURVEY):
            return await redis_scan.survey(self._connections, self._codec, tenant)

    async def ping(self) -> None:
        await self._connections.round_trip_everywhere([("PING",)])

    async def close(self) -> None:
        await self._connections.close()

    async def _look_up(self, key: FeatureKey, refresh: Refresh) -> LookUp:
        return await self._connections.run(
            manifest_name(key), lambda socket: look_up(socket, self._codec, key, refresh)
        )

    def _found(self, looked: LookUp) -> StoredFeature | None:
        if looked.manifest is None:
            return None
        return StoredFeature(looked.manifest, _expiry(max(0, looked.left_ms)))

    async def _read_bundle(self, manifest: Manifest) -> FeatureBundle | None:
        assembly = self._codec.assembly(manifest)
        name, names = manifest_name(manifest.key), chunk_names(manifest)

        async def read(batch: range) -> int:
            chunks = {index: names[index] for index in batch}
            return await self._connections.run(name, lambda held: read_chunks(held, name, chunks, assembly))

        left_ms = min(await _side_by_side(read, _batches(manifest)))
        if left_ms == NO_SUCH_NAME:  # the manifest is the authority: what was deleted is not served
            return None
        READ_BYTES.inc(manifest.size_bytes)
        if refresh := self._refresh_commands(manifest, left_ms):
            await self._round_trip(manifest.key, refresh)
        # Only fp8 has anything left to compute.
        return await asyncio.to_thread(assembly.finish) if manifest.dtype == FP8 else assembly.finish()

    async def _write(self, key: FeatureKey, record: EncodedRecord) -> None:
        # A second try, because servers that evict by sampling may well take the newest values.
        if not (await self._try_to_write(key, record) or await self._try_to_write(key, record)):
            raise StoreFull("the feature store evicts features while they are written")

    async def _try_to_write(self, key: FeatureKey, record: EncodedRecord) -> bool:
        """Writes chunks, then the manifest; False when a chunk was gone before the manifest stood."""
        name, names = manifest_name(key), chunk_names(record.manifest)
        register = lifetime.register(record.manifest, self._ttl_ms)
        close: list[Command] = [
            *(("PEXPIRE", chunk, self._ttl_ms) for chunk in names),
            register,  # its time runs as long as theirs
            ("SET", name, record.sealed_manifest, "PX", self._ttl_ms),
        ]

        def write(held: RedisSocket, batch: range) -> None:
            chunks = [record.chunks[index] for index in batch]
            write_chunks(held, [names[index] for index in batch], chunks, self._ttl_ms)

        def write_all(held: RedisSocket) -> list[Any]:
            exchange_on(held, [register])
            write(held, range(len(names)))
            return exchange_on(held, close)

        batches = _batches(record.manifest)
        if len(batches) == 1:
            *still_there, _, _ = await self._connections.run(name, write_all)
            return all(still_there)
        await self._round_trip(key, [register])
        streams = [self._connections.run(name, partial(write, batch=batch)) for batch in batches]
        # An error ends no other stream: what a server has not yet read of a refused write must not be
        # written after its parts were deleted.
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        *still_there, _, _ = await self._round_trip(key, close)
        return all(still_there)

    def _refresh_commands(self, manifest: Manifest, left_ms: int) -> list[Command]:
        """Gives all parts their full time at least, or nothing while more than half of it is left."""
        return [] if left_ms >= self._ttl_ms / 2 else [lifetime.keep(manifest, self._ttl_ms)]

    async def _discard(self, key: FeatureKey, held: bytes | WrongType) -> None:
        await self._round_trip(key, [lifetime.discard(key, held)])

    async def _discard_write(self, manifest: Manifest) -> None:
        await self._round_trip(manifest.key, lifetime.discard_write(manifest))

    async def _round_trip(self, key: FeatureKey, commands: Sequence[Command]) -> list[Any]:
        return await self._connections.round_trip(manifest_name(key), commands)


def _batches(manifest: Manifest) -> list[range]:
    """The chunks in one range for each stream: two where that is worth the way to another thread."""
    count = len(manifest.chunk_checksums)
    step = count if manifest.size_bytes <= _ONE_STREAM_BYTES else -(-count // _STREAMS)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


async def _side_by_side(work: Callable[[range], Coroutine[Any, Any, T]], batches: Sequence[range]) -> list[T]:
    """Works on all batches at once; the first error ends all of it."""
    tasks = [asyncio.create_task(work(batch)) for batch in batches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _expiry(left_ms: int) -> datetime:
    return datetime.now(UTC) + timedelta(milliseconds=left_ms)
