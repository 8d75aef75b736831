"""How long the parts of a record live in Redis, and how all of them are found; sends nothing itself.

Only the current manifest names its chunks: those of overwritten and of abandoned writes would be found
by a scan of the whole server alone. So each key has a **register** beside its record, a sorted set: one
member for each write of the key, "<write id>:<number of chunks>", scored with the server's time at which
those chunks are gone. A write registers before its first chunk, so that nothing of it is ever unknown,
and each change of the register drops the members whose time has passed. A server that runs out of memory
may evict a register; then chunks of overwritten writes stay until their own time to live is over, and
still nobody is served them.

The scripts use names of one hash tag only, and every name that they touch is passed to them.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from shared.features.codec import MAX_MANIFEST_BYTES
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.names import chunk_names, manifest_name, names_of_write, register_name
from shared.store.redis_replies import WrongType, expected
from shared.store.redis_socket import Command

# What `keep` replies in place of the time that is left.
PART_IS_GONE: Final = 0
OVERWRITTEN: Final = -1

# More chunks fit into no manifest: each has a checksum of 16 bytes there.
_MAX_CHUNKS: Final = MAX_MANIFEST_BYTES // 16
_NAMES_AT_ONCE: Final = 1000
_MAX_WRITES: Final = 10_000
_MEMBER: Final = re.compile(rb"([0-9a-f]{32}):([0-9]{1,5})")

# A full server refuses ZADD, but not in a script that has begun to write: reads must go on there.
_LUA_REGISTER: Final = """
local function register(name, write, ttl)
  if redis.call('TYPE', name).ok ~= 'zset' then redis.call('UNLINK', name) end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.call('ZREMRANGEBYSCORE', name, '-inf', now)
  redis.call('ZADD', name, 'GT', now + ttl, write)
  if redis.call('PTTL', name) < ttl then redis.call('PEXPIRE', name, ttl) end
end
"""
_REGISTER: Final = f"""{_LUA_REGISTER}
register(KEYS[1], ARGV[1], tonumber(ARGV[2]))
return 1
"""
_KEEP: Final = f"""{_LUA_REGISTER}
local held = redis.pcall('GETRANGE', KEYS[1], 0, {MAX_MANIFEST_BYTES})
if type(held) ~= 'string' or held == '' then return {PART_IS_GONE} end
if not string.find(held, ARGV[1], 1, true) then return {OVERWRITTEN} end
for i = 3, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return {PART_IS_GONE} end
end
local ttl = tonumber(ARGV[2])
for i = 1, #KEYS do
  if i ~= 2 and redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
end
register(KEYS[2], ARGV[1] .. ':' .. (#KEYS - 2), ttl)
return redis.call('PTTL', KEYS[1])
"""
# Whatever is not of ours goes at once: it could be half a gigabyte, and must not be pulled in. So goes a
# register of more writes than a key ever sees: the server does nothing else while a script runs.
_READ: Final = f"""
local count = redis.pcall('ZCARD', KEYS[1])
if type(count) ~= 'number' or count > {_MAX_WRITES} then
  redis.call('UNLINK', KEYS[1])
  return {{}}
end
local writes = redis.call('ZRANGE', KEYS[1], 0, -1)
local ours = {{}}
for _, write in ipairs(writes) do
  if #write <= 38 then ours[#ours + 1] = write else redis.call('ZREM', KEYS[1], write) end
end
return ours
"""


# Both delete what was refused, but not what somebody else has written in its place meanwhile: the manifest
# goes only if it still is all that was read, or has the write id.
_DISCARD: Final = f"""
local held = redis.pcall('GETRANGE', KEYS[1], 0, {MAX_MANIFEST_BYTES})
if type(held) ~= 'string' or held == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
return 1
"""
_DISCARD_WRITE: Final = f"""
local held = redis.pcall('GETRANGE', KEYS[1], 0, {MAX_MANIFEST_BYTES})
if type(held) ~= 'string' or string.find(held, ARGV[1], 1, true) then redis.call('UNLINK', KEYS[1]) end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""


def register(manifest: Manifest, ttl_ms: int) -> Command:
    """Registers a write whose chunks live so long from now; replies 1."""
    return ("EVAL", _REGISTER, 1, register_name(manifest.key), _member(manifest), ttl_ms)


def keep(manifest: Manifest, ttl_ms: int) -> Command:
    """Lets all parts of a record live at least so long; replies the milliseconds left, above 0.

    Replies PART_IS_GONE when a part is, and OVERWRITTEN when the manifest is another write's by now; then
    it has changed nothing.
    """
    names = [manifest_name(manifest.key), register_name(manifest.key), *chunk_names(manifest)]
    return ("EVAL", _KEEP, len(names), *names, manifest.write_id, ttl_ms)


def discard(key: FeatureKey, held: bytes | WrongType) -> Command:
    """Deletes a manifest that can't be used, if it still is the one that was read."""
    return ("EVAL", _DISCARD, 1, manifest_name(key), b"" if isinstance(held, WrongType) else held)


def discard_write(manifest: Manifest) -> list[Command]:
    """Deletes a write that can't be used, and its manifest if it still is the one of this write."""
    names = [manifest_name(manifest.key), *chunk_names(manifest)]
    return [
        ("EVAL", _DISCARD_WRITE, len(names), *names, manifest.write_id),
        ("ZREM", register_name(manifest.key), _member(manifest)),
    ]


def read_register(key: FeatureKey) -> Command:
    """Replies the members of the register, for `removal`."""
    return ("EVAL", _READ, 1, register_name(key))


def members(reply: Any) -> list[bytes]:
    """The reply to `read_register`."""
    return [expected(member, bytes) for member in expected(reply, list)]


def removal(key: FeatureKey, current: Manifest | None, members: Sequence[bytes]) -> Iterator[list[Command]]:
    """What removes a key and the writes of its register, in this order; each list is one round trip.

    The first reply of all tells whether there was a manifest. Members go with their chunks, so that a
    removal that was cut short can be repeated, and that a write which registers meanwhile stays known.
    """
    names = chain.from_iterable(_names_of(key, member) for member in members)
    first = [] if current is None else chunk_names(current)
    commands: list[Command] = [("UNLINK", manifest_name(key))]
    for batch in _batches(chain(first, names)):
        commands.append(("UNLINK", *batch))
        yield commands
        commands = []
    if members:
        commands.append(("ZREM", register_name(key), *members))
    if commands:
        yield commands


def milliseconds(seconds: float) -> int:
    """A time to live as Redis takes it: never so short that it means none at all."""
    return max(1, math.ceil(seconds * 1000))


def _member(manifest: Manifest) -> str:
    return f"{manifest.write_id}:{len(manifest.chunk_checksums)}"


def _names_of(key: FeatureKey, member: bytes) -> list[str]:
    match = _MEMBER.fullmatch(member)
    if match is None or int(match[2]) > _MAX_CHUNKS:
        return []
    return names_of_write(key, match[1].decode(), int(match[2]))


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if len(batch) == _NAMES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
