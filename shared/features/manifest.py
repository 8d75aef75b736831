"""What is known of a stored feature without reading its tensor; knows no tensor and no store."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from shared.features.damage import DamageCause, DamagedRecord
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality

StoreDtype = Literal["model", "bfloat16", "fp8"]
"""What an operator may choose to store: the tower's own dtype, or a narrower one."""

BFLOAT16: Final = "bfloat16"
FP8: Final = "float8_e4m3fn"

# Bytes of one value once it has been read: fp8 is read as bfloat16.
_READ_VALUE_BYTES: Final = {"float32": 4, "float16": 2, BFLOAT16: 2, FP8: 2}


def stored_dtype(choice: StoreDtype, model_dtype: str) -> str:
    """The dtype that manifests name, and keys depend on, where the tower computes in `model_dtype`."""
    return {"model": model_dtype, "bfloat16": BFLOAT16, "fp8": FP8}[choice]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of one stored feature, checked when it was read.

    `fingerprint` is that of the checkpoint whose tower made it. The tensor has `token_count` rows of
    `(1 + deepstack_levels) * hidden_size` values of `dtype` ("float32", "float16", "bfloat16", or
    "float8_e4m3fn" with exponents behind the values; see precision.py). Its `size_bytes` are cut
    into chunks of `chunk_bytes` (the last one may be shorter), each with its checksum. `merge_size` is
    the side of the square of patches that became one token. `write_id` tells one write of a key from the
    next and is part of its chunks' names. `created_at` is when the record was made, by its encoder's clock;
    None in records that do not say it.
    """

    key: FeatureKey
    fingerprint: str
    modality: Modality
    grid: Grid
    token_count: int
    hidden_size: int
    deepstack_levels: int
    dtype: str
    timestamps: tuple[float, ...]
    chunk_bytes: int
    size_bytes: int
    chunk_checksums: tuple[bytes, ...]
    merge_size: int = 2
    write_id: str = ""
    created_at: datetime | None = None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensor in memory once it has been read."""
        width = (1 + self.deepstack_levels) * self.hidden_size
        return self.token_count * width * _READ_VALUE_BYTES[self.dtype]

    def chunk_size(self, index: int) -> int:
        """Bytes of one chunk."""
        return min(self.chunk_bytes, self.size_bytes - index * self.chunk_bytes)

    def check_chunk_sizes(self, sizes: Sequence[int]) -> None:
        """Compares the sizes of all chunks as a store reports them.

        Raises:
            DamagedRecord: one is too short or too long.
        """
        if any(size != self.chunk_size(index) for index, size in enumerate(sizes)):
            raise DamagedRecord(DamageCause.LENGTH)
