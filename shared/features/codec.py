"""A feature bundle as a sealed manifest and chunks of raw bytes, and back; knows no store.

Why it is made like this
------------------------
**Nothing that comes from a store is believed.** Anybody who can write to the store, and every broken
disk and half-written value, speaks to the decoder through this file. A wrong picture is worse than no
picture, so each fact is checked before the next one is used, and what does not fit is a DamagedRecord,
which stores turn into a miss:

1. the seal covers every byte of the manifest, so it comes first: after it, a manifest is at least one
   that was written as a whole (and with a store key, by someone who holds it);
2. the layout version, then the key: a valid record under another key's name is the most dangerous one,
   because everything else about it is right;
3. the fields against limits and against one another. All sizes are plain Python integers, so that no
   product can wrap around, and limits come before the first allocation: a manifest of a few hundred
   bytes must not be able to ask for a terabyte;
4. the length and the checksum of each chunk *at its place*, so that swapped chunks are noticed;
5. the values: one NaN would spread through attention into every later token.

The last two are in shared/features/assembly.py.

**Bytes, not numbers.** Values are moved as the bytes that they are. bfloat16 has no NumPy type, and a
detour over float32 doubles the size and hides NaN payloads, so tensors are seen through uint8 views.
Writing slices one view of the tensor (no copy); reading puts each chunk at its place in one buffer that
the tensor then takes over. There is no pickle and no torch.load: no byte can run code.

**Narrower than computed.** A codec may be told to store bfloat16 or fp8 (values, then an exponent for each
row of each level): precision.py converts the tensor before it is cut into chunks, and back after the
last chunk. The manifest names the dtype of the bytes, and every codec reads every dtype.

**Every write has a random id**, which is part of its chunks' names. The same key computed twice may
differ in the last bits (another batch, another GPU); without the id two writers would mix their chunks
into a record that neither manifest fits.
"""

import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from google.protobuf.message import DecodeError

from shared.features.assembly import CHUNK_ALIGNMENT, RecordAssembly
from shared.features.bundle import FeatureBundle
from shared.features.damage import DamageCause, DamagedRecord
from shared.features.grid import Grid
from shared.features.key import LAYOUT_VERSION, FeatureKey, Modality
from shared.features.manifest import Manifest, StoreDtype, stored_dtype
from shared.features.moment import MAX_MILLISECONDS, from_milliseconds, to_milliseconds, utc_now
from shared.features.precision import STORED_DTYPES, dtype_name, stored_size, to_stored
from shared.features.seal import DamageSeal, ForgerySeal, Seal
from shared.pb.lenspair.store.v1.feature_pb2 import FeatureManifest

MAX_MANIFEST_BYTES = 1024 * 1024
MAX_RECORD_BYTES = 4 * 1024**3

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_WRITE_ID = re.compile(r"[0-9a-f]{32}")
_MAX_SIDE = 1 << 20
_MAX_WIDTH = 1 << 16
_MAX_LEVELS = 64
_MAX_MERGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """What is to be stored. `chunks` are views, into the bundle's tensor where its dtype is stored."""

    manifest: Manifest
    sealed_manifest: bytes
    chunks: tuple[memoryview, ...]


class FeatureCodec:
    """Turns bundles into records and back. Its methods take processor time: keep them off event loops.

    `fingerprint` is that of the checkpoint whose features are written. With a `store_key`, records are
    sealed against forgery, and records that were sealed without it are damaged. `store_dtype` is what is
    written; what is read is what the manifest says. `now` tells the time that records are dated with.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        chunk_bytes: int,
        store_key: bytes | None = None,
        store_dtype: StoreDtype = "model",
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise ValueError("a fingerprint is 64 lower-case hexadecimal digits")
        if chunk_bytes < 1 or chunk_bytes % CHUNK_ALIGNMENT:
            raise ValueError(f"chunk_bytes must be a multiple of {CHUNK_ALIGNMENT}")
        self._fingerprint = fingerprint
        self._chunk_bytes = chunk_bytes
        self._store_dtype: StoreDtype = store_dtype
        self._now = now
        self._seal: Seal = DamageSeal() if store_key is None else ForgerySeal(store_key)

    def encode(self, key: FeatureKey, bundle: FeatureBundle) -> EncodedRecord:
        """The record of a bundle under a fresh write id.

        Raises:
            ValueError: the bundle contradicts itself or a limit, so that no reader would accept it.
        """
        dtype = stored_dtype(self._store_dtype, dtype_name(bundle.tensor))
        data = to_stored(bundle.tensor, dtype, levels=1 + bundle.deepstack_levels).numpy().data
        chunks = tuple(
            data[start : start + self._chunk_bytes] for start in range(0, len(data), self._chunk_bytes)
        )
        checksums = [self._seal.checksum(chunk) for chunk in chunks]
        message = self._describe(key, bundle, dtype, len(data), checksums)
        sealed = self._seal.close(message.SerializeToString())
        try:
            manifest = self.decode_manifest(key, sealed)
        except DamagedRecord as damage:
            raise ValueError(f"the bundle can't be stored: {damage.cause}") from damage
        return EncodedRecord(manifest, sealed, chunks)

    def decode_manifest(self, key: FeatureKey, sealed: bytes) -> Manifest:
        """The checked manifest of a key.

        Raises:
            DamagedRecord: anything about it does not fit.
        """
        if len(sealed) > MAX_MANIFEST_BYTES:
            raise DamagedRecord(DamageCause.SIZE)
        message = _parse(self._seal.open(sealed))
        if message.layout_version != LAYOUT_VERSION:
            raise DamagedRecord(DamageCause.VERSION)
        if message.key != str(key):
            raise DamagedRecord(DamageCause.KEY)
        if not (_has_sane_fields(message) and _has_sane_size(message) and self._has_all_checksums(message)):
            raise DamagedRecord(DamageCause.FIELDS)
        return _manifest(key, message)

    def assembly(self, manifest: Manifest) -> RecordAssembly:
        """An empty buffer for the chunks of a manifest that `decode_manifest` returned."""
        return RecordAssembly(manifest, self._seal)

    def _describe(
        self, key: FeatureKey, bundle: FeatureBundle, dtype: str, size_bytes: int, checksums: list[bytes]
    ) -> FeatureManifest:
        grid = bundle.grid
        return FeatureManifest(
            layout_version=LAYOUT_VERSION,
            key=str(key),
            fingerprint=self._fingerprint,
            modality=int(bundle.modality),
            grid_t=grid.t,
            grid_h=grid.h,
            grid_w=grid.w,
            token_count=bundle.token_count,
            hidden_size=bundle.hidden_size,
            deepstack_levels=bundle.deepstack_levels,
            dtype=dtype,
            timestamps=bundle.timestamps,
            chunk_bytes=self._chunk_bytes,
            size_bytes=size_bytes,
            chunk_checksums=checksums,
            merge_size=math.isqrt(grid.t * grid.h * grid.w // bundle.token_count),
            write_id=secrets.token_hex(16),
            created_time_ms=to_milliseconds(self._now()),
        )

    def _has_all_checksums(self, message: FeatureManifest) -> bool:
        count = -(-message.size_bytes // message.chunk_bytes)
        return len(message.chunk_checksums) == count and all(
            len(checksum) == self._seal.checksum_size for checksum in message.chunk_checksums
        )


def _parse(payload: bytes) -> FeatureManifest:
    try:
        return FeatureManifest.FromString(payload)
    except DecodeError as error:
        raise DamagedRecord(DamageCause.SYNTAX) from error


def _has_sane_fields(message: FeatureManifest) -> bool:
    is_video = message.modality == Modality.VIDEO
    return (
        message.modality in list(Modality)
        and message.dtype in STORED_DTYPES
        and _FINGERPRINT.fullmatch(message.fingerprint) is not None
        and _WRITE_ID.fullmatch(message.write_id) is not None
        and len(message.timestamps) == (message.grid_t if is_video else 0)
        and all(math.isfinite(timestamp) for timestamp in message.timestamps)
        and 0 <= message.created_time_ms <= MAX_MILLISECONDS
    )


def _has_sane_size(message: FeatureManifest) -> bool:
    t, h, w, merge = message.grid_t, message.grid_h, message.grid_w, message.merge_size
    if not (
        all(1 <= side <= _MAX_SIDE for side in (t, h, w))
        and 1 <= merge <= _MAX_MERGE_SIZE
        and 1 <= message.hidden_size <= _MAX_WIDTH
        and 0 <= message.deepstack_levels <= _MAX_LEVELS
        and message.chunk_bytes >= 1
        and message.chunk_bytes % CHUNK_ALIGNMENT == 0
    ):
        return False
    size_bytes = stored_size(
        message.dtype,
        rows=message.token_count,
        levels=1 + message.deepstack_levels,
        hidden_size=message.hidden_size,
    )
    return (
        h % merge == w % merge == 0
        and message.token_count * merge**2 == t * h * w
        and message.size_bytes == size_bytes <= MAX_RECORD_BYTES
    )


def _manifest(key: FeatureKey, message: FeatureManifest) -> Manifest:
    return Manifest(
        key=key,
        fingerprint=message.fingerprint,
        modality=Modality(message.modality),
        grid=Grid(message.grid_t, message.grid_h, message.grid_w),
        token_count=message.token_count,
        hidden_size=message.hidden_size,
        deepstack_levels=message.deepstack_levels,
        dtype=message.dtype,
        timestamps=tuple(message.timestamps),
        chunk_bytes=message.chunk_bytes,
        size_bytes=message.size_bytes,
        chunk_checksums=tuple(message.chunk_checksums),
        merge_size=message.merge_size,
        write_id=message.write_id,
        created_at=from_milliseconds(message.created_time_ms) if message.created_time_ms else None,
    )
