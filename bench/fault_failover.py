"""Faults of a store that Sentinel replaces: a planned switch, and a master that dies."""

import importlib
import importlib.util
import os
import signal
from types import TracebackType
from typing import Protocol, Self, cast

from bench.fault_kinds import Fault

_MODULE = "demo.sentinel_store"


class Server(Protocol):
    @property
    def pid(self) -> int: ...


class SentinelServers(Protocol):
    """Two servers under sentinels; `url` is what LENSPAIR_STORE_URL takes."""

    @property
    def url(self) -> str: ...
    @property
    def master(self) -> Server: ...
    @property
    def master_port(self) -> int: ...
    def switch_over(self) -> None: ...
    def wait_for_new_master(self, before: int) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def can_start() -> bool:
    """Whether this version can run a store under Sentinel."""
    return importlib.util.find_spec(_MODULE) is not None


def start() -> SentinelServers:
    """Starts the servers; a context manager."""
    return cast("SentinelServers", importlib.import_module(_MODULE).SentinelStore())


def faults(servers: SentinelServers) -> tuple[Fault, ...]:
    """In the order in which they must happen: nobody follows the second master."""

    def switch_over(_: object) -> None:
        servers.switch_over()

    def kill_master(_: object) -> None:
        before = servers.master_port
        os.kill(servers.master.pid, signal.SIGKILL)
        servers.wait_for_new_master(before)

    return Fault("store-switched", switch_over), Fault("store-failed-over", kill_master)
