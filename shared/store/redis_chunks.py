"""Moves the chunks of a record between a connection and memory; knows no manifests.

Each value goes straight from the tensor's memory to the socket, or from the socket to the memory that
becomes the tensor, where each chunk is checked while the next one is on its way.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from shared.features.assembly import RecordAssembly
from shared.features.damage import DamageCause, DamagedRecord, IncompleteRecord
from shared.store.redis_replies import NO_SUCH_NAME, WrongType, checked_reply, expected
from shared.store.redis_socket import ErrorReply, RedisSocket, bulk, number

_BYTES_AHEAD: Final = 8 * 1024 * 1024


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
    held: RedisSocket, manifest_name: str, names: Mapping[int, str], assembly: RecordAssembly
) -> int:
    """Receives chunks, by their indexes, into their memory; the milliseconds that the manifest lives on.

    -2 when there is no manifest: before the values were read, or any more afterwards. A few values are asked
    for ahead, so that the server never waits, and no more, because it copies what was asked for.

    Raises:
        IncompleteRecord: a value is gone.
        DamagedRecord: one is not what the manifest says.
    """
    left = b"*2\r\n$4\r\nPTTL\r\n" + bulk(manifest_name.encode())
    asked = iter([left, *(b"*2\r\n$3\r\nGET\r\n" + bulk(name.encode()) for name in names.values()), left])
    ahead = 2 + _BYTES_AHEAD // max(len(assembly.memory(index)) for index in names)
    held.send(b"".join(islice(asked, ahead)))
    if _milliseconds(held) == NO_SUCH_NAME:
        held.close()  # the values need not be received
        return NO_SUCH_NAME
    for index in names:
        _receive(held, assembly.memory(index))
        held.send(next(asked, b""))
        assembly.check(index)
        held.get_on()
    return _milliseconds(held)


def _receive(held: RedisSocket, memory: memoryview) -> None:
    _check_size(held.line(), len(memory))
    held.fill(memory)
    held.end_of_string()


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
