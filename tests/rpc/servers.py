"""A real server with tiny services on a free port, and a caller of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from shared.pb.lenspair.decoder.v1.decoder_pb2 import (
    CountTokensRequest,
    CountTokensResponse,
    StreamGenerateRequest,
    StreamGenerateResponse,
)
from shared.rpc.server import RpcServer
from shared.settings import SharedSettings
from tests.rpc.services import SERVICE, Behaviours


def settings(**values: Any) -> SharedSettings:
    """Settings of a server that needs neither checkpoint nor store."""
    return SharedSettings(
        **{"checkpoint": "unused", "store_url": "redis://unused", "listen": "127.0.0.1:0", **values}
    )


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls the behaviours of a server, in this process or another."""

    channel: grpc.aio.Channel
    address: str

    @property
    def health(self) -> Any:
        return HealthStub(self.channel)

    def unary(self, method: str, *, seconds: float | None = None, **options: Any) -> Any:
        """Calls a unary method."""
        call = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=CountTokensRequest.SerializeToString,
            response_deserializer=CountTokensResponse.FromString,
        )
        return call(CountTokensRequest(), timeout=seconds, **options)

    def stream(self, method: str, *, seconds: float | None = None) -> Any:
        """Calls a method that answers with a stream."""
        call = self.channel.unary_stream(
            f"/{SERVICE}/{method}",
            request_serializer=StreamGenerateRequest.SerializeToString,
            response_deserializer=StreamGenerateResponse.FromString,
        )
        return call(StreamGenerateRequest(), timeout=seconds)

    def collect(self, requests: Iterable[CountTokensRequest]) -> Any:
        """Sends a stream, answered once."""
        call = self.channel.stream_unary(
            f"/{SERVICE}/Collect",
            request_serializer=CountTokensRequest.SerializeToString,
            response_deserializer=CountTokensResponse.FromString,
        )
        return call(iter(requests))

    def echo(self, messages: Iterable[StreamGenerateResponse]) -> Any:
        """Sends a stream, answered with the same."""
        call = self.channel.stream_stream(
            f"/{SERVICE}/Echo",
            request_serializer=StreamGenerateResponse.SerializeToString,
            response_deserializer=StreamGenerateResponse.FromString,
        )
        return call(iter(messages))


@dataclass(frozen=True, slots=True)
class Running(Caller):
    """A server, its behaviours, and a caller of it."""

    server: RpcServer
    behaviours: Behaviours


@asynccontextmanager
async def running(
    behaviours: Behaviours | None = None,
    *,
    is_serving: bool = True,
    channel_options: Iterable[tuple[str, Any]] = (),
    server_options: dict[str, Any] | None = None,
    **values: Any,
) -> AsyncIterator[Running]:
    """Serves behaviours; `values` are settings, `server_options` arguments of RpcServer."""
    behaviours = behaviours or Behaviours()
    server = RpcServer(settings(**values), [SERVICE], **(server_options or {}))
    server.add(behaviours.register)
    port = await server.start()
    if is_serving:
        await server.set_serving()
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address, options=list(channel_options)) as channel:
            yield Running(channel, address, server, behaviours)
    finally:
        await server.drain(notice_seconds=0, grace_seconds=0)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a caller sees of a failed call."""

    code: str
    reason: str
    field: str
    message: str


async def failure_of(call: Any) -> Failure:
    """Waits for a call, unary or streaming, that must fail."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return await _failure(error)
    raise AssertionError("the call was answered")


async def eventually(is_so: Callable[[], bool], *, seconds: float = 2.0) -> None:
    """Waits for what happens elsewhere, often after its caller has seen the end of the call."""
    for _ in range(round(seconds / 0.005)):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it did not happen within {seconds} seconds")


async def texts_of(call: Any) -> list[str]:
    """The texts of a streamed answer."""
    return [message.delta.text async for message in call]


async def _failure(error: grpc.aio.AioRpcError) -> Failure:
    info = error_details_pb2.ErrorInfo()
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what a call has
    for detail in status.details if status is not None else ():
        detail.Unpack(info)
    return Failure(error.code().name, info.reason, info.metadata.get("field", ""), error.details() or "")
