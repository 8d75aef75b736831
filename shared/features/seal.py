"""Seals manifests and checks chunks: against damage, or against forgery where there is a store key."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Protocol

import xxhash

from shared.features.damage import DamageCause, DamagedRecord

Bytes = bytes | bytearray | memoryview


class Seal(Protocol):
    """Appends a seal to the bytes of a manifest, and takes the checksum of a chunk."""

    checksum_size: int

    def close(self, payload: bytes) -> bytes:
        """The payload followed by its seal."""

    def open(self, sealed: bytes) -> bytes:
        """The payload.

        Raises:
            DamagedRecord: the seal is not that of the payload.
        """

    def checksum(self, chunk: Bytes) -> bytes:
        """The checksum that a manifest holds for a chunk."""


class DamageSeal:
    """xxh3-128: notices damage. Whoever can write to the store can forge it."""

    checksum_size = 16

    def close(self, payload: bytes) -> bytes:
        return payload + self.checksum(payload)

    def open(self, sealed: bytes) -> bytes:
        return _open(sealed, self.checksum_size, self.checksum)

    def checksum(self, chunk: Bytes) -> bytes:
        return xxhash.xxh3_128_digest(chunk)


class ForgerySeal:
    """HMAC-SHA-256 over the manifest, SHA-256 for chunks: only holders of the key write valid records."""

    checksum_size = 32

    def __init__(self, store_key: bytes) -> None:
        if not store_key:
            raise ValueError("the store key is empty")
        self._store_key = store_key

    def close(self, payload: bytes) -> bytes:
        return payload + self._tag(payload)

    def open(self, sealed: bytes) -> bytes:
        return _open(sealed, 32, self._tag)

    def checksum(self, chunk: Bytes) -> bytes:
        return hashlib.sha256(chunk).digest()

    def _tag(self, payload: bytes) -> bytes:
        return hmac.digest(self._store_key, payload, "sha256")


def _open(sealed: bytes, size: int, tag: Callable[[bytes], bytes]) -> bytes:
    payload, seal = sealed[:-size], sealed[-size:]
    if not hmac.compare_digest(tag(payload), seal):
        raise DamagedRecord(DamageCause.SEAL)
    return payload
