"""Moves the chunks of a record between a connection and memory; knows no manifests.

Each value goes straight from the tensor's memory to the socket, or from the socket to the memory that
becomes the tensor. It is received in pieces small enough to be still in the processor's cache when their
checksum is taken.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final

from shared.features.assembly import ChunkPlace
from shared.features.damage import DamageCause, DamagedRecord, IncompleteRecord
from shared.store.redis_replies import WrongType, checked_reply, expected
from shared.store.redis_socket import ErrorReply, RedisSocket, bulk, number

NO_SUCH_NAME: Final = -2

_BYTES_AHEAD: Final = 8 * 1024 * 1024
_PIECE_BYTES: Final = 512 * 1024


def write_chunks(held: RedisSocket, names: Sequence[str], chunks: Sequence[memoryview], ttl_ms: int) -> None:
    """Sets values with a time to live.

    Raises:
        StoreFull, StoreUnavailable: the server takes one of them not.
    """
    tail = b"\r\n$2\r\nPX\r\n" + bulk(b"%d" % ttl_ms)
    before = b""
    for name, chunk in zip(names, chunks, strict=True):
        head = b"*5\r\n$3\r\nSET\r\n" + bulk(name.encode()) + b"$%d\r\n" % len(chunk)
        held.send(before + head, chunk)
        held.get_on()
        before = tail
    held.send(before)
    # All replies are read before any is judged: what the server has not yet read of a refused write must
    # not be written after its parts were deleted.
    for reply in [held.line() for _ in names]:
        checked_reply(reply)


def read_chunks(
    held: RedisSocket, manifest_name: str, names: Sequence[str], places: Sequence[ChunkPlace]
) -> int:
    """Receives values into their places, and tells how many milliseconds the manifest lives on.

    -2 when there is no manifest: before the values were read, or any more afterwards. A few values are asked
    for ahead, so that the server never waits, and no more, because it copies what was asked for.

    Raises:
        IncompleteRecord: a value is gone.
        DamagedRecord: one is not what its place expects.
    """
    left = b"*2\r\n$4\r\nPTTL\r\n" + bulk(manifest_name.encode())
    asked = iter([left, *(b"*2\r\n$3\r\nGET\r\n" + bulk(name.encode()) for name in names), left])
    ahead = 2 + _BYTES_AHEAD // max(len(place.memory) for place in places)
    held.send(b"".join(islice(asked, ahead)))
    if _milliseconds(held) == NO_SUCH_NAME:
        held.close()  # the values need not be received
        return NO_SUCH_NAME
    for place in places:
        _receive(held, place)
        held.send(next(asked, b""))
        held.get_on()
    return _milliseconds(held)


def _receive(held: RedisSocket, place: ChunkPlace) -> None:
    memory = place.memory
    _check_size(held.line(), len(memory))
    for start in range(0, len(memory), _PIECE_BYTES):
        end = min(start + _PIECE_BYTES, len(memory))
        held.fill(memory[start:end])
        place.received(end)
    held.end_of_string()
    place.close()


def _check_size(reply: bytes | ErrorReply, size: int) -> None:
    match checked_reply(reply):
        case WrongType.WRONG_TYPE:
            raise DamagedRecord(DamageCause.WRONG_TYPE)
        case b"$-1":
            raise IncompleteRecord
        case header if header != b"$%d" % size:
            raise DamagedRecord(DamageCause.LENGTH)


def _milliseconds(held: RedisSocket) -> int:
    return number(expected(checked_reply(held.line()), bytes))
