"""The weight files of a checkpoint: which they are, what their headers say, and the vision fingerprint.

Headers are read here, without torch, because the fingerprint needs exact bytes at exact places; models
are loaded elsewhere.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

_SINGLE_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
_BUFFER_BYTES: Final = 4 * 1024 * 1024
_VISION_PREFIXES: Final = ("model.visual.", "visual.")

# What a vision configuration means where it is silent, so that a configuration that spells a default out
# has the same fingerprint. A test compares these with Transformers.
VISION_DEFAULTS: Final[Mapping[str, Any]] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# Entries that change nothing about what the tower computes. Any entry unknown here counts.
_BOOKKEEPING: Final = frozenset(
    {"architectures", "dtype", "initializer_range", "model_type", "torch_dtype", "transformers_version"}
)


class CheckpointError(Exception):
    """A checkpoint that can't be served; the message is for the operator and names the file."""


class CheckpointNotFound(CheckpointError):
    """Neither a directory nor a model that the hub has."""


class UnsupportedModel(CheckpointError):
    """Not a Qwen3-VL checkpoint."""


class NoSafeWeights(CheckpointError):
    """No safetensors files; pickled weights are refused, for they can run code."""


class DamagedCheckpoint(CheckpointError):
    """A file is truncated, is missing, or contradicts another one."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where the bytes of one tensor stand: `size` bytes from `start` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, in the order of their names.

    Raises:
        NoSafeWeights: there are none.
        DamagedCheckpoint: the index is unreadable, or names a file that is missing or elsewhere.
    """
    if (directory / _SINGLE_FILE).is_file():
        return (directory / _SINGLE_FILE,)
    if not (directory / _INDEX_FILE).is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        found = f"; {pickled[0]} is pickled and is not read" if pickled else ""
        raise NoSafeWeights(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX_FILE}{found}")
    return _indexed_files(directory)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        DamagedCheckpoint: it holds none.
    """
    return _parse_object(path, path.read_bytes())


def read_header(path: Path) -> Iterator[TensorEntry]:
    """The tensors of a safetensors file.

    Raises:
        DamagedCheckpoint: the header does not fit the file.
    """
    file_size = path.stat().st_size
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if header_size > min(_MAX_HEADER_BYTES, file_size - 8):
            raise DamagedCheckpoint(f"{path} is truncated or no safetensors file")
        header = _parse_object(path, file.read(header_size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        yield _entry(path, name, entry, data_start=8 + header_size, file_size=file_size)


def vision_fingerprint(vision_config: Mapping[str, Any], files: Sequence[Path]) -> str:
    """Which vision tower this is: 64 hexadecimal digits.

    SHA-256 over the configuration and over name, dtype, shape and bytes of every tensor of the tower,
    each with its length. It does not depend on language weights, on how tensors are spread over files, or
    on whether names begin with "model.visual." or "visual.".

    Raises:
        DamagedCheckpoint: a file is damaged, holds no tower, or holds a tensor twice.
    """
    digest = hashlib.sha256()
    _add_field(digest, b"lenspair vision tower 1")
    _add_field(digest, _canonical_config(vision_config))
    for name, tensor in sorted(_vision_tensors(files).items()):
        _add_field(digest, name.encode())
        _add_field(digest, tensor.dtype.encode())
        _add_field(digest, json.dumps(tensor.shape).encode())
        _add_bytes(digest, tensor)
    return digest.hexdigest()


def _indexed_files(directory: Path) -> tuple[Path, ...]:
    index_path = directory / _INDEX_FILE
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpoint(f"{index_path} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if name != PurePosixPath(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise DamagedCheckpoint(f"{index_path} names {name!r}, which is no safetensors file beside it")
    paths = tuple(directory / name for name in sorted(names))
    for path in paths:
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing, and {index_path} names it")
    present = {entry.name for path in paths for entry in read_header(path)}
    if missing := sorted(weight_map.keys() - present):
        raise DamagedCheckpoint(f"no file of {directory} holds the tensor {missing[0]}")
    return paths


def _parse_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} holds no readable JSON") from error
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path} holds no JSON object")
    return value


def _entry(path: Path, name: str, entry: Any, *, data_start: int, file_size: int) -> TensorEntry:
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(side) for side in entry["shape"])
        dtype = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} describes the tensor {name} in a way that can't be read") from error
    if not 0 <= begin <= end or math.prod(shape) > 8 * (end - begin):
        raise DamagedCheckpoint(f"{path} describes the tensor {name} with sizes that can't be")
    if data_start + end > file_size:
        raise DamagedCheckpoint(f"{path} is truncated: it ends before the tensor {name} does")
    return TensorEntry(name, dtype, shape, path, data_start + begin, end - begin)


def _vision_tensors(files: Sequence[Path]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for entry in (entry for path in files for entry in read_header(path)):
        prefix = next((prefix for prefix in _VISION_PREFIXES if entry.name.startswith(prefix)), None)
        if prefix is None:
            continue
        name = entry.name.removeprefix(prefix)
        if name in tensors:
            raise DamagedCheckpoint(f"{entry.path} holds the vision tensor {name} a second time")
        tensors[name] = entry
    if not tensors:
        raise DamagedCheckpoint(f"no vision tensors in {', '.join(path.name for path in files)}")
    return tensors


def _canonical_config(vision_config: Mapping[str, Any]) -> bytes:
    given = {
        name: value
        for name, value in vision_config.items()
        if value is not None and name not in _BOOKKEEPING and not name.startswith("_")
    }
    values = {**VISION_DEFAULTS, **given}
    rope = {**VISION_DEFAULTS["rope_parameters"], **values["rope_parameters"]}
    values["rope_parameters"] = {**rope, "rope_theta": float(rope["rope_theta"])}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _add_field(digest: "hashlib._Hash", field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "big"))
    digest.update(field)


def _add_bytes(digest: "hashlib._Hash", tensor: TensorEntry) -> None:
    digest.update(tensor.size.to_bytes(8, "big"))
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, tensor.size)))
    left = tensor.size
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        while left:
            count = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise DamagedCheckpoint(f"{tensor.path} ends before the tensor {tensor.name} does")
            digest.update(buffer[:count])
            left -= count
