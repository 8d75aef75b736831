"""Which Redis server holds a name: the one, the master that Sentinel names, or a cluster's node.

The answers are found out by blocking calls, each bounded by a time-out, and remembered; knows nothing of
what is stored.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, Final, Protocol

from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from shared.errors import StoreUnavailable
from shared.store.redis_url import Address, StoreUrl

# A fail-over that left connections open is noticed this much later at the most.
_SENTINEL_ANSWER_SECONDS: Final = 1.0

Slots = list[tuple[int, int, Address]]


class Servers(Protocol):
    """Where names live. Methods may be called from any thread, and may block for a time-out."""

    def server_of(self, name: str) -> Address | None:
        """The address of the server that holds a name; None: the only one, which the options name.

        Raises:
            redis.ConnectionError, OSError: nobody could be asked.
        """

    def all(self) -> list[Address | None]:
        """One address for each server that holds names; raises like `server_of`."""

    def look_again(self) -> None:
        """Forgets what was found out: a server was gone, or said that it is the wrong one."""


class OnlyServer:
    """One server for all names."""

    def server_of(self, name: str) -> Address | None:
        return None

    def all(self) -> list[Address | None]:
        return [None]

    def look_again(self) -> None:
        """There is nothing to find out."""


class SentinelServers:
    """The master that the sentinels name, asked again every second while it is used.

    Asking again matters where a master was cut off and not killed: it goes on answering whoever is still
    connected to it. While no sentinel answers, the last known master is used as long as it works.
    """

    def __init__(self, url: StoreUrl, timeout_seconds: float) -> None:
        # The sentinels that keep silent leave half of the time to the exchange itself.
        share_seconds = timeout_seconds / 2 / len(url.addresses)
        self._master_name = url.master_name
        self._sentinel = Sentinel(
            url.addresses,
            sentinel_kwargs={
                **url.sentinel_options,
                "socket_timeout": share_seconds,
                "socket_connect_timeout": share_seconds,
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
            },
        )
        self._lock = Lock()
        self._master: Address | None = None
        self._asked_at = -math.inf

    def server_of(self, name: str) -> Address:
        # One thread asks, and the others go on with what is known.
        if self._lock.acquire(blocking=self._master is None):
            try:
                if self._master is None or time.monotonic() - self._asked_at > _SENTINEL_ANSWER_SECONDS:
                    self._ask()
            finally:
                self._lock.release()
        if self._master is None:
            raise RedisConnectionError("no sentinel names the master")
        return self._master

    def all(self) -> list[Address | None]:
        return [self.server_of("")]

    def look_again(self) -> None:
        self._asked_at = -math.inf

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        # What sentinels say may be anything; the last known master is used then.
        with suppress(RedisError, OSError, ValueError, TypeError, LookupError):
            host, port = self._sentinel.discover_master(self._master_name)
            self._master = (host, port)


class ClusterServers:
    """The nodes of a cluster, by slots; asks the nodes that it knows and those of the URL.

    `ask` sends CLUSTER SLOTS to a server and returns the reply.
    """

    def __init__(self, url: StoreUrl, ask: Callable[[Address], Any]) -> None:
        self._seeds = url.addresses
        self._ask = ask
        self._lock = Lock()
        self._known: list[Address] = []
        self._slots: Slots = []

    def server_of(self, name: str) -> Address:
        slot = key_slot(name.encode())
        slots = self._current_slots()
        place = bisect_right(slots, slot, key=lambda held: held[0]) - 1
        if place < 0 or slots[place][1] < slot:
            raise RedisConnectionError("a slot of the cluster is held by nobody")
        return slots[place][2]

    def all(self) -> list[Address | None]:
        return list(dict.fromkeys(address for _, _, address in self._current_slots()))

    def look_again(self) -> None:
        with self._lock:
            self._slots = []

    def _current_slots(self) -> Slots:
        with self._lock:
            if not self._slots:
                self._slots = self._find_slots()
            return self._slots

    def _find_slots(self) -> Slots:
        failure: Exception = RedisConnectionError("the cluster has no node that answers")
        for asked in dict.fromkeys((*self._known, *self._seeds)):
            try:
                if slots := _slots_of(self._ask(asked), asked):
                    # Next time, who has answered is asked first, and not who may keep silent for good.
                    self._known = list(dict.fromkeys((asked, *(address for _, _, address in slots))))
                    return slots
            except (RedisError, StoreUnavailable, OSError) as error:
                failure = error
        raise failure


def _slots_of(reply: Any, asked: Address) -> Slots:
    """The reply to CLUSTER SLOTS: lists of first slot, last slot, master, replicas.

    A node may leave out its host: it is the one that was asked.
    """
    try:
        slots = [
            (int(first), int(last), (master[0].decode() if master[0] else asked[0], int(master[1])))
            for first, last, master, *_ in reply
        ]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise RedisConnectionError("the store broke the protocol") from None
    return sorted(slots)
