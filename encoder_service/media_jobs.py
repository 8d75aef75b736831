"""What the encoder asks of its isolated decoders, and what they answer, as bytes; knows no codec.

A message is the length of a JSON object (8 bytes, big endian), the object, and bytes: files on the way there,
pixels on the way back.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoder_service.clip import ClipHeader, ClipLimits, Frames
from encoder_service.media import MediaLimits, PictureHeader
from encoder_service.sampling import Sampling

Bytes = bytes | bytearray | memoryview
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """What a decoder process checks."""

    media: MediaLimits
    clip: ClipLimits

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: Bytes) -> "DecoderLimits":
        said = json.loads(bytes(packed))
        return cls(MediaLimits(**said["media"]), ClipLimits(**said["clip"]))


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """How a clip is decoded: `times` are those of its header, `size` is (width, height)."""

    sampling: Sampling
    size: tuple[int, int]
    times: tuple[float, ...]


def pack(said: Mapping[str, Any], *files: Bytes) -> bytes:
    head = json.dumps(said).encode()
    return b"".join((len(head).to_bytes(_LENGTH, "big"), head, *files))


def unpack(message: Bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(message)
    length = int.from_bytes(view[:_LENGTH], "big")
    said: dict[str, Any] = json.loads(bytes(view[_LENGTH : _LENGTH + length]))
    return said, view[_LENGTH + length :]


def pack_plan(plan: ClipPlan) -> dict[str, Any]:
    return asdict(plan)


def unpack_plan(said: Mapping[str, Any]) -> ClipPlan:
    return ClipPlan(Sampling(**said["sampling"]), (said["size"][0], said["size"][1]), tuple(said["times"]))


def pack_frames(frames: Frames) -> bytes:
    return pack({"shape": frames.pixels.shape, "times": frames.times}, frames.pixels.data.cast("B"))


def unpack_frames(message: Bytes) -> Frames:
    """Raises ValueError: the bytes are not what their shape says."""
    said, pixels = unpack(message)
    values: NDArray[np.uint8] = np.frombuffer(pixels, np.uint8).reshape(said["shape"])
    return Frames(values, tuple(map(float, said["times"])))


def picture_header(said: Mapping[str, Any]) -> PictureHeader:
    return PictureHeader(str(said["format"]), int(said["width"]), int(said["height"]))


def clip_header(said: Mapping[str, Any]) -> ClipHeader:
    return ClipHeader(int(said["width"]), int(said["height"]), tuple(map(float, said["times"])))
