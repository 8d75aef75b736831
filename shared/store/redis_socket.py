"""One blocking connection to a Redis server, used by one thread at a time; knows nothing of what is stored.

redis-py makes the connection (TLS, user and password, database). Replies are read here, so that no byte of
one is ever left behind unseen. Megabytes are sent from the memory that they lie in, and received into the
memory that they are wanted in. An exchange that fails in any way closes the connection, since what is left
in it would be read as the answer to the next question.
"""

import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

_LINE_BYTES: Final = 512
# What small commands ask for is shorter: manifests end at 1 MiB.
_STRING_BYTES: Final = 2 * 1024 * 1024
_MOST_NESTED: Final = 8

Argument = str | bytes | int | memoryview
Command = tuple[Argument, ...]


class ErrorReply(Exception):
    """An error that a server replied, by its first word, as MOVED or OOM."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text.decode(errors="replace"))
        self.code = text.partition(b" ")[0]


class RedisSocket:
    """A connection; it connects at its first use, and again after it was closed."""

    def __init__(self, options: Mapping[str, Any], timeout_seconds: float) -> None:
        make = options.get("connection_class", Connection)
        arguments = {name: value for name, value in options.items() if name != "connection_class"}
        self._connection: Connection = make(
            **arguments,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
            protocol=2,
            driver_info=None,
        )
        self._socket: socket.socket | None = None
        self._received = b""
        self._is_abandoned = False
        self.got_on_at = 0.0

    def get_on(self) -> None:
        """Notes that a large part of an exchange is through: the time-out begins anew."""
        self.got_on_at = time.monotonic()

    def begin(self, timeout_seconds: float | None = None) -> None:
        """Makes sure that there is a connection, and that nothing waits in it.

        The time-out holds for each wait. Without one, whoever started the exchange bounds it by `abandon`.

        Raises:
            redis.RedisError, OSError: no connection can be made.
        """
        if not self.is_quiet():
            self.close()
        if self._socket is None:
            self._socket = self._connect()
            self._socket.settimeout(timeout_seconds)
        # Whoever gave it up while it was connecting found nothing to shut down.
        if self._is_abandoned:
            raise RedisConnectionError("the exchange was given up")

    def is_quiet(self) -> bool:
        """False when the server has closed it, or when bytes that nobody asked for wait in it."""
        return self._socket is None or not self.has_more(0)

    def has_more(self, seconds: float) -> bool:
        """Waits so long for what the server sends next; its end of the connection is something too."""
        assert self._socket is not None
        if self._received or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def abandon(self) -> None:
        """Ends what another thread does with it; that thread then sees a broken connection."""
        self._is_abandoned = True
        if (held := self._connection._sock) is not None:
            with suppress(OSError):  # it is closed already
                # Not SSLSocket's own shutdown: that would let the other thread read encrypted bytes.
                socket.socket.shutdown(held, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it; the next exchange makes a new connection."""
        self._connection.disconnect()
        self._socket = None
        self._received = b""

    def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        """Sends commands together and reads their replies; error replies are among these."""
        self.send(*self._connection.pack_commands(commands))
        return [self._reply() for _ in commands]

    def tell(self, command: Command) -> None:
        """Sends a command and reads no reply; for subscribers, whose replies come by `push`."""
        self.send(*self._connection.pack_commands([command]))

    def push(self) -> Any:
        """What the server sends next: to subscribers, an array.

        Raises:
            redis.RedisError, OSError: the connection broke, or it is no array.
        """
        said = self._reply()
        if not isinstance(said, list) or len(said) < 2:
            raise RedisConnectionError("the store said something unexpected to a subscriber")
        return said

    def send(self, *parts: bytes | memoryview) -> None:
        """Sends bytes as they are."""
        assert self._socket is not None
        for part in parts:
            self._socket.sendall(part)

    def line(self) -> bytes | ErrorReply:
        """The next line, as a reply begins with one; an error reply as what it says."""
        assert self._socket is not None
        while b"\r\n" not in self._received:
            data = self._socket.recv(_LINE_BYTES)
            if not data or len(self._received) > _LINE_BYTES:
                raise RedisConnectionError("the store closed the connection, or sent no reply")
            self._received += data
        line, self._received = self._received.split(b"\r\n", 1)
        return ErrorReply(line[1:]) if line[:1] == b"-" else line

    def end_of_string(self) -> None:
        """What follows the bytes of a string."""
        if self.line() != b"":
            raise RedisConnectionError("the store broke the protocol")

    def fill(self, memory: memoryview) -> None:
        """Receives as many bytes as the memory holds."""
        assert self._socket is not None
        held = min(len(self._received), len(memory))
        memory[:held] = self._received[:held]
        self._received = self._received[held:]
        # The kernel waits for the whole piece; TLS gives what one of its records holds.
        flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        while held < len(memory):
            count = self._socket.recv_into(memory[held:], 0, flags)
            if not count:
                raise RedisConnectionError("the store closed the connection")
            held += count

    def _connect(self) -> socket.socket:
        try:
            self._connection.connect()
        except ValueError as error:  # a host that can't be one, or a reply that is none
            raise RedisConnectionError("the store can't be connected to") from error
        connected = self._connection._sock
        assert connected is not None
        return connected

    def _reply(self, depth: int = 0) -> Any:
        line = self.line()
        if isinstance(line, ErrorReply):
            return line
        match line[:1]:
            case b"+":
                return line[1:]
            case b":":
                return number(line)
            case b"$":
                return self._string(number(line))
            case b"*" if depth < _MOST_NESTED:
                count = number(line)
                return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        raise RedisConnectionError("the store broke the protocol")

    def _string(self, size: int) -> bytes | None:
        if size > _STRING_BYTES:
            raise RedisConnectionError("the store sent more than was asked for")
        if size < 0:
            return None
        value = bytearray(size)
        self.fill(memoryview(value))
        self.end_of_string()
        return bytes(value)


def number(line: bytes) -> int:
    """The number in the first line of a reply; raises redis.ConnectionError where there is none."""
    try:
        return int(line[1:])
    except ValueError:
        raise RedisConnectionError("the store broke the protocol") from None


def bulk(value: bytes) -> bytes:
    """An argument of a command as it is sent."""
    return b"$%d\r\n%b\r\n" % (len(value), value)
