"""Calls encoders that hand features over; knows neither who may be called nor what features hold."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
from opentelemetry import propagate

from shared.features.key import FeatureKey
from shared.features.source import Address
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.pb.lenspair.encoder.v1 import encoder_pb2_grpc as pb_grpc
from shared.rpc import status
from shared.rpc.call import current_call
from shared.rpc.channel import open_channel

_CHANNELS: Final = 16


class SourceFailed(Exception):
    """An encoder did not hand a feature over. Private to the services: callers see the store's error."""


class SourceLacksFeature(SourceFailed):
    """It has forgotten it, or never had it."""


class SourceTimedOut(SourceFailed):
    """It was too slow."""


class SourceUnreachable(SourceFailed):
    """It can't be reached, refuses, or ends the call in another way."""


class SourceSpeaksNonsense(SourceFailed):
    """Its messages are not those of the contract."""


class FeatureCalls:
    """Makes FetchFeatures calls, over channels that are kept for the next ones."""

    def __init__(
        self, *, open_channel: Callable[[Address], grpc.aio.Channel] = open_channel, max_idle: int = _CHANNELS
    ) -> None:
        self._channels = _Channels(open_channel, max_idle)

    async def fetch(
        self, address: Address, key: FeatureKey, *, timeout_seconds: float, manifest_only: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yields the sealed manifest, then pieces that are not empty. Nothing about them is checked.

        The whole call ends within the time-out. It is made in the name of the tenant of the current call.

        Raises:
            SourceFailed: one of its kinds.
        """
        request = pb.FetchFeaturesRequest(key=str(key), manifest_only=manifest_only)
        async with self._channels.channel(address) as channel:
            stub: Any = pb_grpc.EncoderServiceStub(channel)
            call = stub.FetchFeatures(request, timeout=timeout_seconds, metadata=_metadata())
            try:
                is_first = True
                async for response in call:
                    yield _bytes_in(response, "manifest" if is_first else "piece")
                    is_first = False
            except grpc.aio.AioRpcError as error:
                raise _failure(error.code()) from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Closes all channels. No call may follow."""
        await self._channels.close()


@dataclass(slots=True)
class _Pooled:
    channel: grpc.aio.Channel
    num_users: int = 0


class _Channels:
    """Open channels by address, the one used longest ago first; those in use are never closed."""

    def __init__(self, open_channel: Callable[[Address], grpc.aio.Channel], max_idle: int) -> None:
        self._open_channel = open_channel
        self._max_idle = max_idle
        self._pooled: OrderedDict[Address, _Pooled] = OrderedDict()

    @asynccontextmanager
    async def channel(self, address: Address) -> AsyncIterator[grpc.aio.Channel]:
        pooled = self._pooled.get(address)
        if pooled is None:
            pooled = self._pooled[address] = _Pooled(self._open_channel(address))
        self._pooled.move_to_end(address)
        pooled.num_users += 1
        try:
            yield pooled.channel
        finally:
            pooled.num_users -= 1
            await self._close_idle(self._max_idle)

    async def close(self) -> None:
        await self._close_idle(0)

    async def _close_idle(self, max_idle: int) -> None:
        idle = [address for address, pooled in self._pooled.items() if not pooled.num_users]
        surplus = [self._pooled.pop(address) for address in idle[: max(0, len(idle) - max_idle)]]
        for pooled in surplus:
            await pooled.channel.close()


def _metadata() -> tuple[tuple[str, str], ...]:
    trace_context: dict[str, str] = {}
    propagate.inject(trace_context)
    return (*current_call.get().tenant_metadata, *trace_context.items())


def _bytes_in(response: pb.FetchFeaturesResponse | None, expected: str) -> bytes:
    # None is gRPC's word for bytes that are no such message.
    if response is None or response.WhichOneof("message") != expected:
        raise SourceSpeaksNonsense
    data: bytes = getattr(response, expected)
    if not data:
        raise SourceSpeaksNonsense
    return data


def _failure(code: status.Code) -> SourceFailed:
    if code is status.NOT_FOUND:
        return SourceLacksFeature()
    if code is status.DEADLINE_EXCEEDED:
        return SourceTimedOut()
    return SourceUnreachable()
