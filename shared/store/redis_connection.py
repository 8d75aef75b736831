"""Connections to Redis: URLs, the pool, time-outs and retries; knows nothing of what is stored.

One `round_trip` is the unit of everything: it sends some commands together, reads their replies, and
ends within the configured time-out, whatever the server does. All commands sent through it must be
idempotent, because a broken connection repeats them once.
"""

import asyncio
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Self

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from shared.errors import StoreFull, StoreUnavailable
from shared.store.metrics import CONNECTION_WAIT_SECONDS

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
_HEALTH_CHECK_SECONDS: Final = 15
_READ_BYTES: Final = 256 * 1024

Argument = str | bytes | int | memoryview
Command = tuple[Argument, ...]


class WrongType(Enum):
    """The reply in place of an error of type WRONGTYPE: the name holds something else than bytes."""

    WRONG_TYPE = "WRONGTYPE"


class InvalidStoreUrl(ValueError):
    """The store URL can't be used. The message never repeats it: it may hold a password."""


class RedisConnections:
    """A bounded pool of connections to one server."""

    def __init__(self, pool: BlockingConnectionPool, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float, connections: int) -> Self:
        """Prepares a pool; it connects at the first use.

        Args:
            url: redis://, rediss:// (TLS) or unix:// URL.
            timeout_seconds: longest time of one round trip, waiting for a free connection included.
            connections: most connections at a time; further callers wait.

        Raises:
            InvalidStoreUrl: the URL or an option in it can't be used.
        """
        pool = BlockingConnectionPool(
            **_url_options(url),
            max_connections=connections,
            timeout=timeout_seconds,
            socket_timeout=None,  # `round_trip` bounds the whole exchange
            socket_connect_timeout=timeout_seconds,
            socket_read_size=_READ_BYTES,
            health_check_interval=_HEALTH_CHECK_SECONDS,
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            decode_responses=False,
            protocol=2,
            driver_info=None,
        )
        return cls(pool, timeout_seconds=timeout_seconds)

    async def round_trip(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to the commands, in order. They are not a transaction.

        Raises:
            StoreFull: the server has no memory for one of them.
            StoreUnavailable: no answer within the time-out, or one that says that the server can't serve.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                replies = await self._exchange_pooled(commands)
        except (RedisError, OSError) as error:
            raise StoreUnavailable("the feature store does not answer") from error
        return [_checked(reply) for reply in replies]

    async def close(self) -> None:
        """Closes all connections."""
        await self._pool.aclose()

    async def _exchange_pooled(self, commands: Sequence[Command]) -> list[Any]:
        start = time.perf_counter()
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        CONNECTION_WAIT_SECONDS.observe(time.perf_counter() - start)
        try:
            replies: list[Any] = await connection.retry.call_with_retry(
                lambda: _exchange(connection, commands),
                lambda _: connection.disconnect(nowait=True),
            )
            return replies
        finally:
            # Shielded: a second cancellation must not take a connection out of the pool for ever.
            await asyncio.shield(self._pool.release(connection))


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    # Nothing to do, unless this is the repetition after a break.
    await connection.connect()  # type: ignore[no-untyped-call]
    writer = connection._writer
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _read(connection) for _ in commands]
    except BaseException:
        # Replies may be under way: nobody else may read them from this connection. A plain close would
        # first send what is left of the commands, megabytes that a stopped server never takes.
        if writer is not None:
            writer.transport.abort()
        await connection.disconnect(nowait=True)
        raise


async def _read(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error


def _checked(reply: Any) -> Any:
    match reply:
        case OutOfMemoryError():
            raise StoreFull("the feature store is full") from reply
        case ResponseError() if str(reply).startswith(WrongType.WRONG_TYPE.value):
            return WrongType.WRONG_TYPE
        case ResponseError():
            raise StoreUnavailable("the feature store refused a command") from reply
        case _:
            return reply


def _url_options(url: str) -> dict[str, Any]:
    try:
        options = dict(parse_url(url))
    except ValueError:
        raise InvalidStoreUrl("the store URL can't be read; it is redis://, rediss:// or unix://") from None
    if unknown := sorted(options.keys() - _URL_OPTIONS):
        raise InvalidStoreUrl(f"options that a store URL can't have: {', '.join(unknown)}")
    options.setdefault("connection_class", Connection)
    return options
