"""The in-memory twin of the feature store: for tests, and for one process alone."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from shared.features.bundle import FeatureBundle
from shared.features.codec import EncodedRecord, FeatureCodec
from shared.features.damage import DamagedRecord, IncompleteRecord, UnusableRecord
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.features.moment import utc_now
from shared.store.metrics import READ_BYTES, WRITTEN_BYTES, Operation, observed
from shared.store.names import chunk_names, key_of_manifest, manifest_name
from shared.store.store import StoredFeature
from shared.store.survey import StoreMemory, Survey


@dataclass(slots=True)
class MemoryValue:
    """Bytes under a name, and when they are forgotten."""

    data: bytes
    expires_at: datetime


class MemoryFeatureStore:
    """A FeatureStore in a dictionary. It has no limit but its time to live.

    Its `values` are the sealed manifests and chunks of the real store, under the same names: two of these
    stores may share them as two processes share a server, and tests may damage them.
    """

    def __init__(
        self,
        codec: FeatureCodec,
        *,
        ttl_seconds: float,
        values: dict[str, MemoryValue] | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.values = {} if values is None else values
        self._codec = codec
        self._ttl = timedelta(seconds=ttl_seconds)
        self._now = now

    async def look_up(self, key: FeatureKey) -> StoredFeature | None:
        with observed(Operation.LOOK_UP) as operation:
            found = None
            sealed = self._read(manifest_name(key))
            try:
                found = None if sealed is None else self._check(key, sealed)
                operation.hit_or_miss(found)
            except UnusableRecord as problem:
                operation.refused(problem)
                self._forget(self._names(key))
            return found

    async def fetch(self, manifest: Manifest) -> FeatureBundle | None:
        with observed(Operation.FETCH) as operation:
            bundle = None
            try:
                if self._read(manifest_name(manifest.key)) is not None:
                    chunks = self._read_chunks(manifest)
                    bundle = await asyncio.to_thread(self._assemble, manifest, chunks)
                    self._refresh(manifest)
                    READ_BYTES.inc(manifest.size_bytes)
                operation.hit_or_miss(bundle)
            except UnusableRecord as problem:
                operation.refused(problem)
                self._discard(manifest)
            return bundle

    async def put(self, key: FeatureKey, bundle: FeatureBundle) -> StoredFeature:
        with observed(Operation.PUT):
            record = await asyncio.to_thread(self._codec.encode, key, bundle)
            self._purge()
            expires_at = self._now() + self._ttl
            self._write(record, expires_at)
            WRITTEN_BYTES.inc(record.manifest.size_bytes)
            return StoredFeature(record.manifest, expires_at)

    async def delete(self, key: FeatureKey) -> bool:
        with observed(Operation.DELETE):
            self._purge()
            is_there = manifest_name(key) in self.values
            self._forget(self._names(key))
            return is_there

    async def keep_alive(self, key: FeatureKey, seconds: float) -> datetime | None:
        with observed(Operation.KEEP_ALIVE) as operation:
            found = await self.look_up(key)
            kept = None if found is None else self._extend(found.manifest, timedelta(seconds=seconds))
            operation.hit_or_miss(kept)
            return kept

    async def describe(self, key: FeatureKey) -> StoredFeature | None:
        with observed(Operation.DESCRIBE) as operation:
            found = None
            sealed = self._read(manifest_name(key))
            with suppress(UnusableRecord):
                if sealed is not None:
                    manifest = self._decode(key, sealed)
                    found = StoredFeature(manifest, self.values[manifest_name(key)].expires_at)
            operation.hit_or_miss(found)
            return found

    async def survey(self, tenant: str) -> Survey:
        with observed(Operation.SURVEY):
            counted = Survey(memory=StoreMemory(sum(len(value.data) for value in self.values.values()), 0))
            for name, value in list(self.values.items()):
                key = key_of_manifest(name)
                if key is not None and key.tenant == tenant and value.expires_at > self._now():
                    self._count(key, value, counted)
            return counted

    async def ping(self) -> None:
        """Memory always answers."""

    async def close(self) -> None:
        """There is nothing to give back."""

    def _check(self, key: FeatureKey, sealed: bytes) -> StoredFeature:
        manifest = self._decode(key, sealed)
        return StoredFeature(manifest, self._refresh(manifest))

    def _decode(self, key: FeatureKey, sealed: bytes) -> Manifest:
        manifest = self._codec.decode_manifest(key, sealed)
        manifest.check_chunk_sizes([len(chunk) for chunk in self._read_chunks(manifest)])
        return manifest

    def _count(self, key: FeatureKey, value: MemoryValue, counted: Survey) -> None:
        try:
            counted.add(self._codec.decode_manifest(key, value.data), value.expires_at)
        except DamagedRecord:
            counted.damaged += 1

    def _read_chunks(self, manifest: Manifest) -> list[bytes]:
        chunks = [self._read(name) for name in chunk_names(manifest)]
        there = [chunk for chunk in chunks if chunk]
        if len(there) < len(chunks):
            raise IncompleteRecord
        return there

    def _assemble(self, manifest: Manifest, chunks: list[bytes]) -> FeatureBundle:
        assembly = self._codec.assembly(manifest)
        for index, chunk in enumerate(chunks):
            assembly.add(index, chunk)
        return assembly.finish()

    def _write(self, record: EncodedRecord, expires_at: datetime) -> None:
        for name, chunk in zip(chunk_names(record.manifest), record.chunks, strict=True):
            self.values[name] = MemoryValue(bytes(chunk), expires_at)
        self.values[manifest_name(record.manifest.key)] = MemoryValue(record.sealed_manifest, expires_at)

    def _read(self, name: str) -> bytes | None:
        value = self.values.get(name)
        return None if value is None or value.expires_at <= self._now() else value.data

    def _refresh(self, manifest: Manifest) -> datetime:
        now = self._now()
        expires_at = min((part.expires_at for part in self._parts(manifest)), default=now)
        return self._extend(manifest, self._ttl) if expires_at - now < self._ttl / 2 else expires_at

    def _extend(self, manifest: Manifest, by: timedelta) -> datetime:
        expires_at = self._now() + by
        parts = self._parts(manifest)
        for part in parts:
            part.expires_at = max(part.expires_at, expires_at)
        return min((part.expires_at for part in parts), default=expires_at)

    def _parts(self, manifest: Manifest) -> list[MemoryValue]:
        names = [manifest_name(manifest.key), *chunk_names(manifest)]
        return [self.values[name] for name in names if name in self.values]

    def _names(self, key: FeatureKey) -> list[str]:
        prefix = manifest_name(key).removesuffix("m")
        return [name for name in self.values if name.startswith(prefix)]

    def _discard(self, manifest: Manifest) -> None:
        """Forgets one write, and the manifest unless another write has replaced it."""
        sealed = self._read(manifest_name(manifest.key)) or b""
        if manifest.write_id.encode() in sealed:
            self._forget([manifest_name(manifest.key)])
        self._forget(chunk_names(manifest))

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def _purge(self) -> None:
        now = self._now()
        self._forget([name for name, value in self.values.items() if value.expires_at <= now])
