"""Leases in Redis: a name beside the record, with a time to live; knows nothing of what is leased.

The name holds its holder's token. It is set only where it does not stand, and renewed or deleted only where
it holds the token. Each release is published on one channel, and each process that has met another one's
lease hears it (redis_subscription.py): in a cluster, messages reach all nodes.

What is sent here may be repeated, like everything that RedisConnections sends: a lease that was taken by an
exchange whose answer got lost is found under the holder's own token by the second one.
"""

import asyncio
from contextlib import AbstractContextManager
from typing import Final

from shared.errors import StoreUnavailable
from shared.features.key import FeatureKey
from shared.store.leases import MAX_LEASE_SECONDS, Bells, HeldLease
from shared.store.names import lease_name
from shared.store.redis_connection import RedisConnections
from shared.store.redis_replies import NO_SUCH_NAME, WrongType
from shared.store.redis_subscription import RedisSubscription

RELEASED_CHANNEL: Final = "lenspair:released"

_TOKEN_BYTES: Final = 64
# A lease exchange is small: two threads serve thousands in a second.
_CONNECTIONS: Final = 2

_RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""


class RedisFeatureLeases:
    """FeatureLeases in Redis, on connections of their own: they never wait behind megabytes."""

    def __init__(self, connections: RedisConnections, *, seconds: float) -> None:
        self._connections = connections
        self._seconds = seconds
        self._milliseconds = round(seconds * 1000)
        self._bells = Bells()
        self._subscription = RedisSubscription(
            connections, RELEASED_CHANNEL, self._bells.ring, self._bells.ring_all
        )

    @property
    def seconds(self) -> float:
        return self._seconds

    async def take(self, key: FeatureKey, token: str) -> HeldLease:
        name = lease_name(key)
        _, holder, left_ms = await self._connections.round_trip(
            name,
            [
                ("SET", name, token, "NX", "PX", self._milliseconds),
                ("GETRANGE", name, 0, _TOKEN_BYTES),
                ("PTTL", name),
            ],
        )
        if left_ms == NO_SUCH_NAME:  # it has ended between the commands
            return HeldLease("", 0.0)
        if isinstance(holder, WrongType) or not 0 <= left_ms <= MAX_LEASE_SECONDS * 1000:
            raise StoreUnavailable("the feature store holds something else than a lease under its name")
        held = HeldLease(holder.decode(errors="replace"), left_ms / 1000)
        if held.holder != token:
            self._subscription.start()
        return held

    async def renew(self, key: FeatureKey, token: str) -> bool:
        name = lease_name(key)
        command = ("EVAL", _RENEW, 1, name, token, self._milliseconds)
        (is_held,) = await self._connections.round_trip(name, [command])
        return bool(is_held)

    async def release(self, key: FeatureKey, token: str) -> bool:
        name = lease_name(key)
        commands = [("EVAL", _RELEASE, 1, name, token), ("PUBLISH", RELEASED_CHANNEL, name)]
        was_held, _ = await self._connections.round_trip(name, commands)
        return bool(was_held)

    def listening(self, key: FeatureKey) -> AbstractContextManager[asyncio.Event]:
        return self._bells.listening(lease_name(key))

    async def close(self) -> None:
        await self._subscription.close()
        await self._connections.close()


def open_leases(*, url: str, seconds: float, timeout_seconds: float) -> RedisFeatureLeases:
    """The leases of a store's URL. They connect at the first use.

    Args:
        url: see shared/store/redis_url.py.
        seconds: how long a lease lasts unless it is renewed.
        timeout_seconds: longest wait for one answer of the store.

    Raises:
        InvalidStoreUrl: the URL can't be used. The message repeats no secret.
    """
    connections = RedisConnections.open(url, timeout_seconds=timeout_seconds, connections=_CONNECTIONS)
    return RedisFeatureLeases(connections, seconds=seconds)
