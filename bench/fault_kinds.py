"""What can go wrong with the processes around a request: one function for each fault, none of them kind.

A fault is injected by a call that returns when it is over: the process runs again, the store has room.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import redis
from redis.exceptions import OutOfMemoryError

from demo.pair import Pair, ServiceProcess

STORE_OUTAGE_SECONDS = 5.0
# Longer than a client takes to notice that a server hangs (lenspair_client/options.py).
HANG_SECONDS = 20.0
CUTTING_SECONDS = 5.0
_BETWEEN_CUTS_SECONDS = 0.02
_BALLAST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` does it to a pair and returns when it is over."""

    name: str
    inject: Callable[[Pair], None]


def kill_store(pair: Pair) -> None:
    """SIGKILL, some seconds without a store, then an empty one at the same address."""
    assert pair.store is not None
    os.kill(pair.store.pid, signal.SIGKILL)
    time.sleep(STORE_OUTAGE_SECONDS)
    pair.restart_store()


def stop_store(pair: Pair) -> None:
    """SIGSTOP: connections stay and nothing answers, until SIGCONT."""
    assert pair.store is not None
    os.kill(pair.store.pid, signal.SIGSTOP)
    time.sleep(STORE_OUTAGE_SECONDS)
    os.kill(pair.store.pid, signal.SIGCONT)


def empty_store(pair: Pair) -> None:
    """Restarted at once: all connections break and every feature is gone."""
    pair.restart_store()


def fill_store(pair: Pair) -> None:
    """No memory for writes and no eviction, then room again."""
    with redis.Redis.from_url(pair.store_url) as server:
        server.config_set("maxmemory-policy", "noeviction")
        server.config_set("maxmemory", int(server.info("memory")["used_memory"]) + 4 * _BALLAST_BYTES)
        ballast: list[str] = []
        with suppress(OutOfMemoryError):
            while True:
                ballast.append(f"ballast-{len(ballast)}")
                server.set(ballast[-1], bytes(_BALLAST_BYTES))
        time.sleep(STORE_OUTAGE_SECONDS)
        server.delete(*ballast)
        server.config_set("maxmemory", 0)


def cut_connections(pair: Pair) -> None:
    """CLIENT KILL for one connection of the services after the other, and for those that replace them."""
    end = time.monotonic() + CUTTING_SECONDS
    with redis.Redis.from_url(pair.store_url) as server:
        own = server.client_id()
        while time.monotonic() < end:
            for client in server.client_list():
                if int(client["id"]) != own:
                    server.client_kill_filter(_id=client["id"])
                    time.sleep(_BETWEEN_CUTS_SECONDS)
            time.sleep(_BETWEEN_CUTS_SECONDS)


def kill_and_start(service: ServiceProcess) -> None:
    """SIGKILL, and a new process at the same address."""
    service.send(signal.SIGKILL)
    service.restart()


def hang(service: ServiceProcess) -> None:
    """SIGSTOP: the kernel goes on taking connections and bytes, and nobody answers."""
    service.send(signal.SIGSTOP)
    time.sleep(HANG_SECONDS)
    service.send(signal.SIGCONT)


def drain_and_start(service: ServiceProcess) -> None:
    """SIGTERM, as a roll-out does, and a new process at the same address."""
    service.send(signal.SIGTERM)
    service.restart()


def encoders(pair: Pair) -> list[ServiceProcess]:
    return pair.encoders


def decoders(pair: Pair) -> list[ServiceProcess]:
    return pair.decoders


def each(
    services: Callable[[Pair], list[ServiceProcess]], harm: Callable[[ServiceProcess], None]
) -> Callable[[Pair], None]:
    """Harms one service after the other, so that one of them always serves."""

    def harm_each(pair: Pair) -> None:
        for service in services(pair):
            harm(service)

    return harm_each


FAULTS = (
    Fault("store-killed", kill_store),
    Fault("decoder-killed", each(decoders, kill_and_start)),
    Fault("store-stopped", stop_store),
    Fault("encoder-killed", each(encoders, kill_and_start)),
    Fault("store-emptied", empty_store),
    Fault("decoder-hanging", lambda pair: hang(pair.decoders[0])),
    Fault("store-full", fill_store),
    Fault("encoder-hanging", lambda pair: hang(pair.encoders[1])),
    Fault("connections-cut", cut_connections),
    Fault("decoder-drained", each(decoders, drain_and_start)),
    Fault("encoder-drained", each(encoders, drain_and_start)),
)
