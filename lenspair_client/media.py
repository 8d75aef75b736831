"""A picture as the client holds it: its bytes and their digest."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from lenspair_client.errors import UnreadableImage


@dataclass(frozen=True, slots=True)
class Media:
    """The bytes of a file. Two with one digest are one."""

    data: bytes = field(repr=False, compare=False)
    sha256: bytes


def load(image: bytes | Path) -> Media:
    """Reads a picture and computes its digest; it may take a while.

    Raises:
        UnreadableImage: the file can't be read. What is in it is the encoder's business.
    """
    data = _read(image) if isinstance(image, Path) else image
    return Media(data, hashlib.sha256(data).digest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableImage(f"can't read {path}: {error.strerror}") from None
