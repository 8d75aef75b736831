"""Frames on a pipe: a kind, a length, bytes; knows not what they mean."""

import os
import struct
from enum import IntEnum

# One byte of kind, eight of length.
_HEADER = struct.Struct("<BQ")


class Kind(IntEnum):
    """What a frame holds."""

    JOB = 1
    RESULT = 2
    REFUSAL = 3  # JSON of an error that the caller may see


class BrokenFrame(Exception):
    """The other end is gone, or wrote what no frame is."""


def write_frame(pipe: int, kind: Kind, payload: bytes | bytearray | memoryview) -> None:
    """Blocks until the other end has taken all of it. Raises BrokenFrame."""
    view = memoryview(payload).cast("B")
    try:
        _write_all(pipe, memoryview(_HEADER.pack(kind, len(view))))
        _write_all(pipe, view)
    except OSError:
        raise BrokenFrame("the other end is gone") from None


def read_frame(pipe: int, *, max_bytes: int) -> tuple[Kind, bytearray]:
    """Blocks until a whole frame is there. Raises BrokenFrame."""
    kind, length = _HEADER.unpack(_read_exactly(pipe, _HEADER.size))
    if kind not in list(Kind) or length > max_bytes:
        raise BrokenFrame(f"a frame of kind {kind} with {length} bytes")
    return Kind(kind), _read_exactly(pipe, length)


def _write_all(pipe: int, view: memoryview) -> None:
    while view:
        view = view[os.write(pipe, view) :]


def _read_exactly(pipe: int, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = os.readv(pipe, [view])
        except OSError:
            count = 0
        if count == 0:
            raise BrokenFrame("the other end is gone")
        view = view[count:]
    return data
