"""What is known of a stored feature without reading its tensor; knows no tensor and no store."""

from dataclasses import dataclass

from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of one stored feature, checked when it was read.

    `fingerprint` is that of the checkpoint whose tower made it. The tensor has `token_count` rows of
    `(1 + deepstack_levels) * hidden_size` values of `dtype` ("float32", "float16" or "bfloat16"), cut
    into chunks of `chunk_bytes` (the last one may be shorter), each with its checksum.
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
