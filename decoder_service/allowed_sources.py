"""Which encoders a decoder may connect to, as its operator lists them. Pure.

An entry is an exact host, `*.suffix` for every name below a suffix, or a network such as `10.0.0.0/8` or
`[fd00::]/8`; each may end in `:port`, without which any port is allowed. Names are matched as names, never
looked up: a network allows IP addresses only, and an IP address in another spelling is refused.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Self

from shared.features.source import Address, parse_host, parse_port

_ENTRY: Final = re.compile(r"(\*\.)?(\[[^\[\]]*\]|[^\[\]:/]+)(/[0-9]{1,3})?(:[^:]+)?")


@dataclass(frozen=True, slots=True)
class _Entry:
    port: int | None
    host: str = ""
    suffix: str = ""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None

    def allows(self, address: Address) -> bool:
        if self.port is not None and self.port != address.port:
            return False
        ip = address.ip
        if self.network is not None:
            return ip is not None and ip in self.network
        if self.suffix:
            return ip is None and address.host.endswith(self.suffix)
        return address.host == self.host


class AllowedSources:
    """The list; an empty one allows nothing."""

    def __init__(self, entries: tuple[_Entry, ...] = ()) -> None:
        self._entries = entries

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads entries with commas between them.

        Raises:
            ValueError: one can't be read; the message says which.
        """
        return cls(tuple(_parse(entry) for part in text.split(",") if (entry := part.strip())))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def allows(self, address: Address) -> bool:
        """True when some entry does."""
        return any(entry.allows(address) for entry in self._entries)


def _parse(text: str) -> _Entry:
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a host, *.suffix or network")
    star, host, bits, port = match.groups()
    try:
        number = None if port is None else parse_port(port[1:])
        if bits is not None and star is None:
            return _Entry(number, network=ipaddress.ip_network(parse_host(host) + bits))
        if star is not None and bits is None:
            return _Entry(number, suffix=_suffix(host))
        if star is None:
            return _Entry(number, host=parse_host(host))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    raise ValueError(f"{text!r} is not a host, *.suffix or network")


def _suffix(host: str) -> str:
    name = parse_host(host)
    if Address(name, 1).ip is not None:
        raise ValueError("a suffix is a name")
    return f".{name}"
