"""Exchanges with Redis: bounded in number and time, repeated once; knows nothing of what is stored.

Each exchange runs on a thread of a small pool, on a connection of that thread's own. Who finds no free
thread waits in line. An exchange that takes longer than the time-out, or whose caller goes away, is given
up: its connection is shut down, and whatever was under way in it reaches nobody. Everything that is sent
must be idempotent, because an exchange is repeated once when its connection breaks, when a fail-over has
taken the server's role away, or when a cluster's slot has moved.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.errors import StoreUnavailable
from shared.store.metrics import CONNECTION_WAIT_SECONDS
from shared.store.redis_replies import checked_reply, exchange_on
from shared.store.redis_servers import ClusterServers, OnlyServer, SentinelServers, Servers
from shared.store.redis_socket import Command, RedisSocket
from shared.store.redis_url import Address, StoreKind, StoreUrl, parse_store_url

T = TypeVar("T")
Job = Callable[[RedisSocket], T]


class RedisConnections:
    """A bounded number of connections to one server, a master that Sentinel names, or each cluster node."""

    def __init__(self, url: StoreUrl, *, timeout_seconds: float, connections: int) -> None:
        self._options = url.options
        self._timeout_seconds = timeout_seconds
        self._servers = self._open_servers(url)
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="store")
        self._own = threading.local()
        self._sockets_of_threads: list[dict[Address | None, RedisSocket]] = []
        self._exchanges: set[_Exchange] = set()
        self._is_closed = False

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float, connections: int) -> Self:
        """Prepares connections; they are made at the first use.

        Args:
            url: see shared/store/redis_url.py.
            timeout_seconds: longest time of one exchange, waiting for a free thread included; in large ones,
                longest time of each chunk.
            connections: most exchanges at a time, and most connections to one server.

        Raises:
            InvalidStoreUrl: the URL or an option in it can't be used.
        """
        return cls(parse_store_url(url), timeout_seconds=timeout_seconds, connections=connections)

    async def round_trip(self, name: str, commands: Sequence[Command]) -> list[Any]:
        """The replies of the server that holds `name` to commands about it, in order; no transaction.

        Raises:
            StoreFull: the server has no memory for one of them.
            StoreUnavailable: no answer within the time-out, or one that says that the server can't serve.
        """
        return await self.run(name, lambda held: exchange_on(held, commands))

    async def servers(self) -> list[Address | None]:
        """Every server that holds names, for `round_trip_at`; raises StoreUnavailable."""
        return await self._run(lambda _: self._servers.all())

    async def round_trip_everywhere(self, commands: Sequence[Command]) -> list[list[Any]]:
        """The replies of every server that holds names; raises like `round_trip`."""
        servers = await self.servers()
        return list(await asyncio.gather(*(self.round_trip_at(server, commands) for server in servers)))

    async def round_trip_at(self, server: Address | None, commands: Sequence[Command]) -> list[Any]:
        """The replies of one server; raises like `round_trip`."""

        def work(exchange: _Exchange) -> list[Any]:
            with self._connected(exchange, server) as held:
                return exchange_on(held, commands)

        return await self._run(work)

    def own_socket(self, number: int) -> RedisSocket:
        """A connection outside the pool, to one of the servers, for the caller's own thread; may block.

        The number chooses among the servers, which are found out anew.

        Raises:
            redis.RedisError, OSError: no server can be found.
        """
        self._servers.look_again()
        servers = self._servers.all()
        return self._new_socket(servers[number % len(servers)], self._timeout_seconds)

    async def run(self, name: str, job: Job[T]) -> T:
        """Runs an idempotent job on a connection to the server that holds `name`.

        Raises like `round_trip`, and what the job raises.
        """

        def work(exchange: _Exchange) -> T:
            with self._connected(exchange, self._servers.server_of(name)) as held:
                return job(held)

        return await self._run(work)

    async def close(self) -> None:
        """Closes all connections; exchanges that are under way or wait in line end as unavailable."""
        self._is_closed = True
        for exchange in tuple(self._exchanges):
            exchange.give_up()
        await asyncio.to_thread(self._threads.shutdown)
        for sockets in self._sockets_of_threads:
            for held in sockets.values():
                held.close()

    async def _run(self, work: "Callable[[_Exchange], T]") -> T:
        if self._is_closed:
            raise StoreUnavailable("the feature store is closed")
        exchange = _Exchange()
        self._exchanges.add(exchange)
        future = asyncio.wrap_future(self._threads.submit(self._work_twice, exchange, work))
        try:
            await self._wait(exchange, future)
            return future.result()
        except (RedisError, OSError) as error:  # a TimeoutError is one
            raise StoreUnavailable("the feature store does not answer") from error
        finally:
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen, also when the caller has gone
            exchange.give_up()
            self._exchanges.discard(exchange)

    async def _wait(self, exchange: "_Exchange", future: asyncio.Future[T]) -> None:
        """Returns when the work is done; raises TimeoutError when it does not get on for the time-out."""
        while not future.done():
            left = self._seconds_left(exchange)
            if left <= 0:
                raise TimeoutError
            await asyncio.wait([future], timeout=left)

    def _seconds_left(self, exchange: "_Exchange") -> float:
        return exchange.got_on_at + self._timeout_seconds - time.monotonic()

    def _work_twice(self, exchange: "_Exchange", work: "Callable[[_Exchange], T]") -> T:
        CONNECTION_WAIT_SECONDS.observe(time.monotonic() - exchange.began_at)
        try:
            exchange.check()
            return work(exchange)
        except (RedisError, OSError):
            # A server that keeps silent may have a successor; that a caller went away means nothing.
            if not exchange.is_given_up or self._seconds_left(exchange) <= 0:
                self._servers.look_again()
            exchange.check()
            return work(exchange)

    @contextmanager
    def _connected(self, exchange: "_Exchange", server: Address | None) -> Iterator[RedisSocket]:
        """This thread's connection to a server; closed when the block fails in any way."""
        sockets = self._own_sockets()
        if server not in sockets:
            for other in [other for other, held in sockets.items() if not held.is_quiet()]:
                sockets.pop(other).close()  # of a server that is gone, perhaps for good
            sockets[server] = self._new_socket(server, self._timeout_seconds)
        held = sockets[server]
        try:
            with exchange.using(held):
                held.begin()
                yield held
        except BaseException:
            held.close()
            del sockets[server]
            raise

    def _own_sockets(self) -> dict[Address | None, RedisSocket]:
        if not hasattr(self._own, "sockets"):
            self._own.sockets = {}
            self._sockets_of_threads.append(self._own.sockets)
        sockets: dict[Address | None, RedisSocket] = self._own.sockets
        return sockets

    def _new_socket(self, server: Address | None, timeout_seconds: float) -> RedisSocket:
        where = {} if server is None else {"host": server[0], "port": server[1]}
        return RedisSocket({**self._options, **where}, timeout_seconds)

    def _open_servers(self, url: StoreUrl) -> Servers:
        match url.kind:
            case StoreKind.SERVER:
                return OnlyServer()
            case StoreKind.SENTINEL:
                return SentinelServers(url, self._timeout_seconds)
            case StoreKind.CLUSTER:
                return ClusterServers(url, self._ask_for_slots)

    def _ask_for_slots(self, server: Address) -> Any:
        # Half of the time, so that another node can be asked when this one keeps silent.
        timeout_seconds = self._timeout_seconds / 2
        held = self._new_socket(server, timeout_seconds)
        try:
            held.begin(timeout_seconds)
            return checked_reply(held.round_trip([("CLUSTER", "SLOTS")])[0])
        finally:
            held.close()


class _Exchange:
    """One exchange under way, which its caller may give up from another thread."""

    def __init__(self) -> None:
        self.is_given_up = False
        self.began_at = self._got_on_at = time.monotonic()
        self._socket: RedisSocket | None = None
        self._lock = threading.Lock()

    @property
    def got_on_at(self) -> float:
        """When it began, or when the last large part of it was through, in whichever attempt."""
        if (held := self._socket) is not None:
            self._got_on_at = max(self._got_on_at, held.got_on_at)
        return self._got_on_at

    def check(self) -> None:
        """Raises redis.ConnectionError when nobody waits for it any more."""
        if self.is_given_up:
            raise RedisConnectionError("the exchange was given up")

    @contextmanager
    def using(self, held: RedisSocket) -> Iterator[None]:
        with self._lock:
            self.check()
            self._socket = held
        try:
            yield
        finally:
            with self._lock:
                self._got_on_at = max(self._got_on_at, held.got_on_at)
                self._socket = None
        self.check()  # a connection that was shut down must not be kept

    def give_up(self) -> None:
        with self._lock:
            self.is_given_up = True
            if self._socket is not None:
                self._socket.abandon()
