"""Reads store URLs: one server, Sentinel or Cluster; knows no connections.

    redis://user:password@host:6379/0                       one server (rediss:// with TLS)
    unix:///run/redis.sock?db=0                             one server on this machine
    redis+sentinel://user:password@a:26379,b:26379/mymaster/0   the master that the sentinels name
    redis+cluster://user:password@a:6379,b:6379             a cluster, by some of its nodes

The last two are rediss+… with TLS. IPv6 addresses stand in brackets.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from redis.connection import parse_url

# What may stand in a store URL. Everything else is refused: `decode_responses` would corrupt bytes, and
# time-outs and pool sizes are settings of ours, which options of the URL would override silently.
_URL_OPTIONS: Final = frozenset(
    {
        "connection_class",
        "db",
        "host",
        "password",
        "path",
        "port",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_keyfile",
        "username",
    }
)
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_DEFAULT_PORTS: Final = {"sentinel": 26379, "cluster": 6379}

Address = tuple[str, int]


class InvalidStoreUrl(ValueError):
    """The store URL can't be used. The message never repeats it: it may hold a password."""


class StoreKind(StrEnum):
    """Who says which server to talk to."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """What a store URL says.

    `options` are the arguments of a redis-py connection, without host and port where these are found out.
    `addresses` are the sentinels, or some nodes of the cluster. `sentinel_options` are the sentinels' own
    user and password, and the TLS settings of `options`.
    """

    kind: StoreKind
    options: dict[str, Any] = field(repr=False)
    addresses: tuple[Address, ...] = ()
    master_name: str = ""
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)


def parse_store_url(url: str) -> StoreUrl:
    """What a store URL says.

    Raises:
        InvalidStoreUrl: it is none, or has an option that a store URL can't have.
    """
    try:
        parts = urlsplit(url)
        base, _, kind = parts.scheme.partition("+")
        if not kind:
            return StoreUrl(StoreKind.SERVER, _options(url))
        return _parse_several(parts, base, StoreKind(kind))
    except InvalidStoreUrl:
        raise
    except ValueError:
        raise InvalidStoreUrl(
            "the store URL can't be read; it begins with redis://, rediss://, unix://, redis+sentinel:// or "
            "redis+cluster:// (rediss+... with TLS)"
        ) from None


def _parse_several(parts: SplitResult, base: str, kind: StoreKind) -> StoreUrl:
    if kind is StoreKind.SERVER or base not in ("redis", "rediss"):
        raise ValueError(base)
    credentials, at, hosts = parts.netloc.rpartition("@")
    addresses = tuple(_address(host, _DEFAULT_PORTS[kind]) for host in hosts.split(","))
    first, *others = [unquote(step) for step in parts.path.split("/")[1:]] or [""]
    database = first if kind is StoreKind.CLUSTER else "/".join(others)
    if kind is StoreKind.SENTINEL and not first:
        raise InvalidStoreUrl("a store URL of Sentinel names the master: redis+sentinel://host:26379/name")
    if kind is StoreKind.CLUSTER and database not in ("", "0"):
        raise InvalidStoreUrl("a cluster has no database but 0")
    options = _options(f"{base}://{credentials}{at}localhost/{database}?{parts.query}", _SENTINEL_OPTIONS)
    sentinel_options = {name: value for name, value in options.items() if name.startswith("ssl_")}
    for name in ("username", "password"):
        if (value := options.pop(f"sentinel_{name}", None)) is not None:
            sentinel_options[name] = value
    if kind is StoreKind.CLUSTER and sentinel_options.keys() & {"username", "password"}:
        raise InvalidStoreUrl("options that a store URL of a cluster can't have: sentinel_*")
    sentinel_options["ssl"] = base == "rediss"
    del options["host"]
    master_name = first if kind is StoreKind.SENTINEL else ""
    return StoreUrl(kind, options, addresses, master_name, sentinel_options)


def _address(text: str, default_port: int) -> Address:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise InvalidStoreUrl("a store URL needs host:port, or several of them with commas between")
    return parts.hostname, parts.port or default_port


def _options(url: str, more_options: frozenset[str] = frozenset()) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
        raise InvalidStoreUrl("the database in a store URL is a number")
    options = dict(parse_url(url))
    if unknown := sorted(options.keys() - _URL_OPTIONS - more_options):
        raise InvalidStoreUrl(f"options that a store URL can't have: {', '.join(unknown)}")
    return options
