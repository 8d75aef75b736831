"""What identifies a feature: the three-part key and the digests it is made of. Pure; knows no model.

A key reads `<tenant>.<namespace>.<digest>`, each part the 64 lower-case hexadecimal digits of a SHA-256:

- `tenant`: who may see the feature, as the server knows the caller;
- `namespace`: everything about checkpoint, processor, libraries and dtypes that decides what the tower
  sees and computes;
- `digest`: the content, and the effective media settings.

Digests cover **framed** fields: each field goes in as its length (8 bytes, big endian) and its bytes, so
that no two lists of fields can give the same stream of bytes.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from shared.errors import MalformedFeatureKey

LAYOUT_VERSION = 1

# What may be the name of a tenant.
TENANT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}$"

_KEY_PATTERN = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64})\.([0-9a-f]{64})")


class Modality(IntEnum):
    """What a feature was made from; the values of lenspair.encoder.v1.Modality."""

    IMAGE = 1
    VIDEO = 2


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """The media settings that were used, after the server's defaults filled what a request left unset.

    Pixels are counts after resizing. `None` where a setting does not apply: pixel budgets when
    `do_resize` is false, the last three for pictures.
    """

    do_resize: bool
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None

    def fields(self) -> tuple[bytes, ...]:
        return (
            _encode(self.do_resize),
            _encode(self.min_pixels),
            _encode(self.max_pixels),
            _encode(self.total_pixels),
            _encode(None if self.fps is None else float(self.fps)),
            _encode(self.num_frames),
        )


@dataclass(frozen=True, slots=True)
class FeatureKey:
    """One feature's identity. The parts are full SHA-256 digests in hexadecimal, never shortened."""

    tenant: str
    namespace: str
    digest: str

    def __str__(self) -> str:
        return f"{self.tenant}.{self.namespace}.{self.digest}"

    @classmethod
    def parse(cls, text: str, *, field: str = "feature_key") -> Self:
        """Reads a key that a caller sent.

        Raises:
            MalformedFeatureKey: the text is not a key. The text itself is not repeated in the error.
        """
        match = _KEY_PATTERN.fullmatch(text)
        if match is None:
            raise MalformedFeatureKey(
                "not a feature key: pass FeatureRef.key as the encoder returned it", field=field
            )
        return cls(*match.groups())


def tenant_tag(tenant: str) -> str:
    """The key part of a tenant; the empty name is the one tenant of a server that knows none."""
    return _digest("lenspair tenant", [tenant.encode()])


def namespace(fields: Iterable[tuple[str, str]]) -> str:
    """The key part of everything that decides what the tower sees and computes.

    `fields` are (name, value) pairs; their order does not matter.
    """
    frames = [LAYOUT_VERSION.to_bytes(4, "big")]
    for name, value in sorted(fields):
        frames += [name.encode(), value.encode()]
    return _digest("lenspair namespace", frames)


def media_digest(modality: Modality, media_sha256: bytes, settings: EffectiveSettings) -> str:
    """The key part of one encoded file: `media_sha256` is the SHA-256 of its bytes."""
    return _digest("lenspair media", [_encode(int(modality)), media_sha256, *settings.fields()])


def frames_digest(
    frame_sha256s: Sequence[bytes], timestamps: Sequence[float], settings: EffectiveSettings
) -> str:
    """The key part of a list of frames, each with its time in seconds."""
    frames: list[bytes] = [_encode(len(frame_sha256s))]
    for sha256, timestamp in zip(frame_sha256s, timestamps, strict=True):
        frames += [sha256, _encode(float(timestamp))]
    return _digest("lenspair frames", [*frames, *settings.fields()])


def _encode(value: bool | int | float | None) -> bytes:
    match value:
        case None:
            return b"none"
        case bool():
            return b"bool:1" if value else b"bool:0"
        case int():
            return b"int:%d" % value
        case float():
            return b"float:" + struct.pack(">d", value)


def _digest(domain: str, fields: Iterable[bytes]) -> str:
    sha = hashlib.sha256()
    for field in (domain.encode(), *fields):
        sha.update(len(field).to_bytes(8, "big"))
        sha.update(field)
    return sha.hexdigest()
