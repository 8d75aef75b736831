"""Which encoder hands a feature over, as text that only holders of the store key can write. Pure.

A source reads `<host>:<port>/<tag>`. The tag is an HMAC-SHA-256 in 64 hexadecimal digits over the address
and the feature's key, both framed by their lengths, under a key of its own that is derived from the store
key. Callers carry sources from encoders to decoders; without the tag they could make a decoder connect to
any address, or take one feature's source for another feature.
"""

import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Self

from shared.features.key import FeatureKey

_LABEL: Final = b"lenspair hand-over source 1"
_MAX_HOST_LENGTH: Final = 253
_MAX_SOURCE_LENGTH: Final = _MAX_HOST_LENGTH + len(":65535/") + 64
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/%]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """A host, in lower case and without brackets, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `name:port`, `1.2.3.4:port` or `[::1]:port`.

        Raises:
            ValueError: it is something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ValueError("an address is host:port, with brackets around an IPv6 host")
        return cls(parse_host(match[1]), parse_port(match[2]))

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as a number; None for a name."""
        return _ip(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host(text: str) -> str:
    """A host in its one spelling.

    Raises:
        ValueError: it is neither a name nor an IP address (in brackets where it is of version 6).
    """
    is_bracketed = text.startswith("[")
    bare = (text[1:-1] if is_bracketed else text).lower()
    ip = _ip(bare)
    if ip is not None and (ip.version == 6) == is_bracketed:
        return str(ip)
    # Resolvers read names that end in a number as odd spellings of IP addresses.
    is_odd_ip = _NUMBER.fullmatch(bare.rpartition(".")[2]) is not None
    if is_bracketed or is_odd_ip or len(bare) > _MAX_HOST_LENGTH or not _NAME.fullmatch(bare):
        raise ValueError("a host is a name, an IPv4 address, or an IPv6 address in brackets")
    return bare


def parse_port(text: str) -> int:
    """A port that can be connected to.

    Raises:
        ValueError: it is not a number from 1 to 65535.
    """
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65_535:
        raise ValueError("a port is a number from 1 to 65535")
    return int(text)


class SourceSeal:
    """Writes and reads sources; both sides must hold the same store key."""

    def __init__(self, store_key: bytes) -> None:
        if not store_key:
            raise ValueError("the store key is empty")
        self._key = hmac.digest(store_key, _LABEL, "sha256")

    def close(self, address: Address, key: FeatureKey) -> str:
        """The source that says: this address hands this feature over."""
        return f"{address}/{self._tag(str(address), key)}"

    def open(self, source: str, key: FeatureKey) -> Address | None:
        """The address, if the source was written by a holder of the store key, for this very feature."""
        if len(source) > _MAX_SOURCE_LENGTH:
            return None
        text, _, tag = source.rpartition("/")
        if not hmac.compare_digest(self._tag(text, key).encode(), tag.encode()):
            return None
        try:
            return Address.parse(text)
        except ValueError:
            return None

    def _tag(self, address: str, key: FeatureKey) -> str:
        framed = b"".join(
            len(field).to_bytes(8, "big") + field for field in (address.encode(), str(key).encode())
        )
        return hmac.digest(self._key, framed, "sha256").hex()


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
