"""What a Redis server's replies mean, and whether they answer what was asked; knows no connections."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeVar

from redis.exceptions import RedisError

from shared.errors import StoreFull, StoreUnavailable
from shared.store.redis_socket import Argument, Command, ErrorReply, RedisSocket

T = TypeVar("T")

# What PTTL replies where there is no such name.
NO_SUCH_NAME: Final = -2


class WrongType(Enum):
    """The reply in place of an error of type WRONGTYPE: the name holds something else than bytes."""

    WRONG_TYPE = "WRONGTYPE"


# What replies may be; those of scripts are for their readers to check.
_REPLIES: Final[dict[Argument, tuple[type, ...]]] = {
    "GETRANGE": (bytes, WrongType),
    "INFO": (bytes,),
    "PEXPIRE": (int,),
    "PTTL": (int,),
    "SCAN": (list,),
    "SET": (bytes, type(None)),  # nothing: NX, and the name stands
    "STRLEN": (int, WrongType),
    "UNLINK": (int,),
}


class WrongServer(RedisError):
    """The server can't serve the name (any more): it became a replica, a slot has moved, or it loads."""


def checked_reply(reply: Any) -> Any:
    """The reply, if it is no error that says something about the server.

    Raises:
        StoreFull, StoreUnavailable, WrongServer: it is.
    """
    if not isinstance(reply, ErrorReply):
        return reply
    match reply.code:
        case b"MOVED" | b"READONLY" | b"LOADING" | b"MASTERDOWN" | b"CLUSTERDOWN":
            raise WrongServer from reply
        case b"OOM":
            raise StoreFull("the feature store is full") from reply
        case b"WRONGTYPE":
            return WrongType.WRONG_TYPE
        case _:
            raise StoreUnavailable("the feature store refused a command") from reply


def expected(reply: Any, kind: type[T]) -> T:
    """The reply, if it is of this kind; raises StoreUnavailable where the server broke the protocol."""
    if not isinstance(reply, kind):
        raise StoreUnavailable("the feature store broke the protocol")
    return reply


def exchange_on(held: RedisSocket, commands: Sequence[Command]) -> list[Any]:
    """The checked replies to commands on a connection, for jobs of `RedisConnections.run`."""
    replies = [checked_reply(reply) for reply in held.round_trip(commands)]
    for command, reply in zip(commands, replies, strict=True):
        if not isinstance(reply, _REPLIES.get(command[0], object)):
            raise StoreUnavailable("the feature store broke the protocol")
    return replies
