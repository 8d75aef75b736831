"""The feature store in Redis; knows how records are laid out there, and nothing of what is in them.

A record is a manifest and its chunks, all under one hash tag and with one time to live. Chunks are
written first and the manifest last: there is no feature without a manifest. Each write has names of its
own for its chunks (see shared/features/codec.py), so a reader never meets the chunks of another write.

Reads are bounded: a manifest is read with GETRANGE, because a hostile value of half a gigabyte must not
be pulled in whole, and chunks only after STRLEN has said their sizes. STRLEN it is, not EXISTS, also
because EXISTS does not count as a use: with `allkeys-lru` the chunks of a picture whose answers come
from prefix caches would be evicted while it is asked about all the time.
"""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from shared.errors import StoreFull
from shared.features.bundle import FeatureBundle
from shared.features.codec import MAX_MANIFEST_BYTES, EncodedRecord, FeatureCodec, RecordAssembly
from shared.features.damage import DamageCause, DamagedRecord, IncompleteRecord, UnusableRecord
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest, StoreDtype
from shared.store.metrics import READ_BYTES, WRITTEN_BYTES, Operation, observed
from shared.store.names import chunk_names, manifest_name
from shared.store.redis_connection import Command, RedisConnections, WrongType
from shared.store.store import FeatureStore, StoredFeature

_BATCH_BYTES: Final = 8 * 1024 * 1024
_NO_SUCH_NAME: Final = -2

# Deletes a refused record, but not one that somebody else has written in its place meanwhile: the
# manifest goes only if it holds ARGV[1], which is its write id, or all of it where it can't be read.
_DISCARD: Final = f"""
local held = redis.pcall('GETRANGE', KEYS[1], 0, {MAX_MANIFEST_BYTES})
if type(held) ~= 'string' or held == '' or string.find(held, ARGV[1], 1, true) then
  redis.call('UNLINK', KEYS[1])
end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
"""


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
        url: redis://, rediss:// or unix:// URL.
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
    """A FeatureStore in one Redis server."""

    def __init__(self, connections: RedisConnections, codec: FeatureCodec, *, ttl_seconds: float) -> None:
        self._connections = connections
        self._codec = codec
        self._ttl_ms = round(ttl_seconds * 1000)

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        with observed(Operation.LOOK_UP) as operation:
            found = None
            held, left_ms = await self._read_manifest(key)
            if left_ms == _NO_SUCH_NAME:
                operation.hit_or_miss(None)
                return None
            try:
                manifest = self._decode(key, held)
            except DamagedRecord as problem:
                operation.refused(problem)
                await self._discard([manifest_name(key)], held)
                return None
            try:
                found = StoredFeature(manifest, _expiry(await self._check_chunks(manifest, left_ms)))
                operation.hit_or_miss(found)
            except UnusableRecord as problem:
                operation.refused(problem)
                await self._discard_write(manifest)
            return found

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
            held, _ = await self._read_manifest(key)
            names = [manifest_name(key)]
            with suppress(DamagedRecord):
                names += chunk_names(self._decode(key, held))
            removed = await self._connections.round_trip([("UNLINK", name) for name in names])
            return bool(removed[0])

    async def ping(self) -> None:
        await self._connections.round_trip([("PING",)])

    async def close(self) -> None:
        await self._connections.close()

    async def _read_manifest(self, key: FeatureKey) -> tuple[bytes | WrongType, int]:
        name = manifest_name(key)
        held, left_ms = await self._connections.round_trip(
            [("GETRANGE", name, 0, MAX_MANIFEST_BYTES), ("PTTL", name)]
        )
        return held, left_ms

    def _decode(self, key: FeatureKey, held: bytes | WrongType) -> Manifest:
        if isinstance(held, WrongType):
            raise DamagedRecord(DamageCause.WRONG_TYPE)
        return self._codec.decode_manifest(key, held)

    async def _check_chunks(self, manifest: Manifest, left_ms: int) -> int:
        """Asks for the size of every chunk, refreshes the record if it is due, and returns what is left."""
        names = chunk_names(manifest)
        refresh = self._refresh_commands(manifest, left_ms)
        replies = await self._connections.round_trip([*(("STRLEN", name) for name in names), *refresh])
        sizes = replies[: len(names)]
        if WrongType.WRONG_TYPE in sizes:
            raise DamagedRecord(DamageCause.WRONG_TYPE)
        if 0 in replies:  # a chunk is gone, or was when it was to be refreshed, or the manifest was
            raise IncompleteRecord
        manifest.check_chunk_sizes(sizes)
        return self._ttl_ms if refresh else left_ms

    async def _read_bundle(self, manifest: Manifest) -> FeatureBundle | None:
        assembly = self._codec.assembly(manifest)
        names = chunk_names(manifest)
        left_ms = self._ttl_ms
        for batch in _batches(manifest):
            left_ms, chunks = await self._connections.round_trip(
                [("PTTL", manifest_name(manifest.key)), ("MGET", *(names[index] for index in batch))]
            )
            if left_ms == _NO_SUCH_NAME:  # the manifest is the authority: what was deleted is not served
                return None
            if None in chunks:
                raise IncompleteRecord
            await asyncio.to_thread(_add_chunks, assembly, batch, chunks)
        bundle = await asyncio.to_thread(assembly.finish)
        READ_BYTES.inc(manifest.size_bytes)
        if refresh := self._refresh_commands(manifest, left_ms):
            await self._connections.round_trip(refresh)
        return bundle

    async def _write(self, key: FeatureKey, record: EncodedRecord) -> None:
        # A second try, because servers that evict by sampling may well take the newest values.
        if not (await self._try_to_write(key, record) or await self._try_to_write(key, record)):
            raise StoreFull("the feature store evicts features while they are written")

    async def _try_to_write(self, key: FeatureKey, record: EncodedRecord) -> bool:
        """Writes chunks, then the manifest; False when a chunk was gone before the manifest stood."""
        names = chunk_names(record.manifest)
        for batch in _batches(record.manifest):
            await self._connections.round_trip(
                [("SET", names[index], record.chunks[index], "PX", self._ttl_ms) for index in batch]
            )
        *still_there, _ = await self._connections.round_trip(
            [
                *(("PEXPIRE", name, self._ttl_ms) for name in names),
                ("SET", manifest_name(key), record.sealed_manifest, "PX", self._ttl_ms),
            ]
        )
        return all(still_there)

    def _refresh_commands(self, manifest: Manifest, left_ms: int) -> list[Command]:
        """Gives all parts their full time, or nothing while more than half of it is left."""
        if left_ms >= self._ttl_ms / 2:
            return []
        names = [*chunk_names(manifest), manifest_name(manifest.key)]
        return [("PEXPIRE", name, self._ttl_ms) for name in names]

    async def _discard_write(self, manifest: Manifest) -> None:
        names = [manifest_name(manifest.key), *chunk_names(manifest)]
        await self._discard(names, manifest.write_id.encode())

    async def _discard(self, names: list[str], held: bytes | WrongType) -> None:
        mark = "held no bytes" if isinstance(held, WrongType) else held
        await self._connections.round_trip([("EVAL", _DISCARD, len(names), *names, mark)])


def _batches(manifest: Manifest) -> list[range]:
    """Ranges of chunks of about 8 MiB: one round trip each, so that its time-out suits its size."""
    count = len(manifest.chunk_checksums)
    step = max(1, _BATCH_BYTES // manifest.chunk_bytes)
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def _add_chunks(assembly: RecordAssembly, indexes: range, chunks: list[bytes]) -> None:
    for index, chunk in zip(indexes, chunks, strict=True):
        assembly.add(index, chunk)


def _expiry(left_ms: int) -> datetime:
    return datetime.now(UTC) + timedelta(milliseconds=left_ms)
