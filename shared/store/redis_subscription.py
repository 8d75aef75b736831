"""Hears one Redis channel on a thread and a connection of its own; knows nothing of what is said there.

Waiting for a message has no end in time, so it has no place among the bounded exchanges of
redis_connection.py. A connection that breaks is made again; whatever was said meanwhile is lost, so the
listener is told of each break and of each new start.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from shared.errors import StoreUnavailable
from shared.store.redis_connection import RedisConnections
from shared.store.redis_replies import WrongServer, checked_reply
from shared.store.redis_socket import RedisSocket

_log = structlog.get_logger("lenspair.store")

# After so long a silence the server is asked for a sign of life; after another one it counts as gone.
_SILENCE_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0


class RedisSubscription:
    """A subscription to one channel, from `start` to `close`.

    `on_message` gets what is said. `on_gap` is called when messages may have been missed: once the channel
    is heard for the first time, when the connection breaks, and when it is heard again. Both are called in
    the event loop.
    """

    def __init__(
        self,
        connections: RedisConnections,
        channel: str,
        on_message: Callable[[str], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._channel = channel
        self._on_message = on_message
        self._on_gap = on_gap
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._socket: RedisSocket | None = None

    def start(self) -> None:
        """Begins to hear the channel; harmless when it is heard already."""
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._run, args=[loop], name="store-subscription", daemon=True
            )
            self._thread.start()

    async def close(self) -> None:
        """Ends the thread; nothing is called afterwards."""
        self._is_closed.set()
        with self._lock:
            if self._socket is not None:
                self._socket.abandon()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        number = 0
        while not self._is_closed.is_set():
            try:
                self._hear(loop, number)
            except (RedisError, OSError, StoreUnavailable, WrongServer) as error:
                if self._is_closed.is_set():
                    return
                _log.warning(
                    "a subscription to the store broke; it is made again", error=type(error).__name__
                )
                loop.call_soon_threadsafe(self._on_gap)
                number += 1  # in a cluster, another node
                self._is_closed.wait(_RETRY_SECONDS)

    def _hear(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        held = self._connections.own_socket(number)
        with self._lock:
            self._socket = held
        try:
            if not self._is_closed.is_set():
                self._subscribe(held)
                loop.call_soon_threadsafe(self._on_gap)
            while not self._is_closed.is_set():
                kind, _, data = self._next(held)
                if kind == b"message":
                    loop.call_soon_threadsafe(self._on_message, data.decode(errors="replace"))
        finally:
            with self._lock:
                self._socket = None
            held.close()

    def _subscribe(self, held: RedisSocket) -> None:
        held.begin(_SILENCE_SECONDS)
        checked_reply(held.round_trip([("SUBSCRIBE", self._channel)])[0])

    def _next(self, held: RedisSocket) -> tuple[bytes, bytes, Any]:
        """What is said next; the answer to a PING is one of two parts, and is filled up."""
        if not held.has_more(_SILENCE_SECONDS):
            held.tell(("PING",))
            if not held.has_more(_SILENCE_SECONDS):
                raise RedisConnectionError("the store is silent")
        kind, first, *rest = held.push()
        return kind, first, rest[0] if rest else None
