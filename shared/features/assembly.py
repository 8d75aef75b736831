"""Puts the chunks of one record together in one piece of memory, each checked on its way; knows no store."""

from typing import Any, Final

import numpy as np
import torch

from shared.features.buffers import BufferPool
from shared.features.bundle import FeatureBundle
from shared.features.damage import DamageCause, DamagedRecord
from shared.features.manifest import FP8, Manifest
from shared.features.precision import from_stored
from shared.features.seal import Bytes, Seal

# Chunks begin at multiples of this, so that no value lies in two of them.
CHUNK_ALIGNMENT: Final = 16

# An integer type of the same size, and the bits of infinity in it. Above these lie the NaNs.
_INFINITY_BITS: Final[dict[str, tuple[type[np.signedinteger[Any]], type[np.unsignedinteger[Any]], int]]] = {
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
}

_BUFFERS: Final = BufferPool()


class RecordAssembly:
    """The memory of one record, whose chunks come in any order, from several threads; becomes the tensor."""

    def __init__(self, manifest: Manifest, seal: Seal) -> None:
        self._manifest = manifest
        self._seal = seal
        self._buffer = _BUFFERS.take(manifest.size_bytes)
        self._missing = set(range(len(manifest.chunk_checksums)))

    def memory(self, index: int) -> memoryview:
        """Where a chunk belongs; `check` it when it is there."""
        start = index * self._manifest.chunk_bytes
        return self._buffer.data[start : start + self._manifest.chunk_size(index)]

    def check(self, index: int) -> None:
        """Looks at a chunk that has been put into its memory, all of it at once and nothing else.

        Raises:
            DamagedRecord: its checksum is not that of the manifest, or a value is NaN or infinite.
        """
        chunk = self.memory(index)
        if self._seal.checksum(chunk) != self._manifest.chunk_checksums[index]:
            raise DamagedRecord(DamageCause.CHECKSUM)
        if not _is_finite(chunk, self._manifest.dtype):
            raise DamagedRecord(DamageCause.NOT_FINITE)
        self._missing.discard(index)

    def add(self, index: int, chunk: Bytes) -> None:
        """Checks a whole chunk and copies it.

        Raises:
            DamagedRecord: its length or checksum is not that of the manifest, or a value is not finite.
        """
        memory = self.memory(index)
        if len(chunk) != len(memory):
            raise DamagedRecord(DamageCause.LENGTH)
        memory[:] = chunk
        self.check(index)

    def finish(self) -> FeatureBundle:
        """The bundle; every chunk has been added.

        Raises:
            DamagedRecord: a value of fp8 is NaN, or its scale beyond the limits.
        """
        assert not self._missing, "chunks are missing"
        manifest = self._manifest
        levels = 1 + manifest.deepstack_levels
        data = torch.from_numpy(self._buffer)
        bundle = FeatureBundle(
            modality=manifest.modality,
            grid=manifest.grid,
            tensor=from_stored(data, manifest.dtype, rows=manifest.token_count, levels=levels),
            hidden_size=manifest.hidden_size,
            deepstack_levels=manifest.deepstack_levels,
            timestamps=manifest.timestamps,
        )
        if manifest.dtype == FP8 and not bundle.is_finite():
            raise DamagedRecord(DamageCause.NOT_FINITE)
        return bundle


def _is_finite(values: memoryview, dtype: str) -> bool:
    """True when no value is NaN or infinite.

    In a format's bits, those are the largest numbers of either sign: two maxima tell, several times faster
    than a look at each value. Values of fp8 are numbers after their conversion only.
    """
    if dtype == FP8:
        return True
    signed, unsigned, infinity = _INFINITY_BITS[dtype]
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    numbers = np.frombuffer(values, signed)
    return bool(numbers.max() < infinity and numbers.view(unsigned).max() < infinity + sign)
