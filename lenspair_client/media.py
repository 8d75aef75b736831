"""A picture or clip as the client holds it: its bytes and their digests."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from lenspair_client.errors import UnreadableImage
from lenspair_client.values import Clip, Image


@dataclass(frozen=True, slots=True)
class Media:
    """The bytes of a file, or of the frames of a clip. Two with the same digests and times are one."""

    data: bytes = field(repr=False, compare=False)
    sha256: bytes
    is_clip: bool = False
    frames: tuple[bytes, ...] = field(default=(), repr=False, compare=False)
    frame_sha256s: tuple[bytes, ...] = ()
    timestamps: tuple[float, ...] = ()


def load(image: Image) -> Media:
    """Reads a picture or clip and computes its digests; it may take a while.

    Raises:
        UnreadableImage: the file can't be read. What is in it is the encoder's business.
    """
    if not isinstance(image, Clip):
        data = _read(image)
        return Media(data, hashlib.sha256(data).digest())
    if image.file is None:
        digests = tuple(hashlib.sha256(frame).digest() for frame in image.frames)
        return Media(b"", b"", True, image.frames, digests, image.timestamps)
    data = _read(image.file)
    return Media(data, hashlib.sha256(data).digest(), is_clip=True)


def _read(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise UnreadableImage(f"can't read {source}: {error.strerror}") from None
