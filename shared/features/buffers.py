"""Memory for features that are read, used again when nobody holds it any more; knows nothing of its content.

Fresh memory costs more than the network: the kernel clears each page at its first touch, and large pieces
go back to the kernel as soon as they are freed.

Whether somebody holds a piece is for Python to say. What is lent is an array; tensors and views made from
it hold it, whatever way they go, and a weak reference to it tells when it has ceased to be. For that, the
array must be the last array in the line: NumPy lets a view of a view refer to the first array of the line
directly. So the memory below is a mapping of its own and no array.
"""

import mmap
import weakref
from collections import defaultdict
from contextlib import suppress
from threading import RLock
from typing import Any, Final

import numpy as np

_LEAST_BYTES: Final = 1024 * 1024
_KEPT_BYTES: Final = 256 * 1024 * 1024

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class BufferPool:
    """Lends memory, and keeps at most `kept_bytes` of what came back. May be used from several threads."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = kept_bytes
        self._room = kept_bytes
        self._kept: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        # Arrays may cease to be at any moment, in the middle of `take` too.
        self._lock = RLock()

    @property
    def kept_bytes(self) -> int:
        """How much lies here unused."""
        return self._most_bytes - self._room

    def take(self, size: int) -> Buffer:
        """`size` bytes of any content, the caller's until no array, view or tensor on them is left."""
        if size < _LEAST_BYTES:
            return np.empty(size, dtype=np.uint8)
        memory = self._reuse(_rounded(size)) or _new_memory(_rounded(size))
        lent = np.frombuffer(memory, dtype=np.uint8, count=size)
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _reuse(self, size: int) -> mmap.mmap | None:
        with self._lock:
            if not self._kept[size]:
                return None
            self._room += size
            return self._kept[size].pop()

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            if len(memory) <= self._room:
                self._room -= len(memory)
                self._kept[len(memory)].append(memory)


def _rounded(size: int) -> int:
    """The next of four steps between powers of two, so that features of nearly one size share memory."""
    step = 1 << (size.bit_length() - 3)
    return -(-size // step) * step


def _new_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
