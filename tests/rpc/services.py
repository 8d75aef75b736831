"""Tiny services, each method of which provokes one behaviour; in our own contracts' messages."""

from __future__ import annotations  # RpcMethodHandler has no [] at run time

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from shared.pb.lenspair.decoder.v1.decoder_pb2 import (
    CountTokensRequest,
    CountTokensResponse,
    Delta,
    StreamGenerateRequest,
    StreamGenerateResponse,
)

SERVICE = "test.Behaviours"
Context = grpc.aio.ServicerContext[Any, Any]


def count(number: int) -> CountTokensResponse:
    return CountTokensResponse(input_tokens=number)


def delta(text: str) -> StreamGenerateResponse:
    return StreamGenerateResponse(delta=Delta(text=text))


@dataclass
class Behaviours:
    """One handler for each way in which a call can go; `seen` and `ended` tell the tests what happened."""

    error: BaseException | None = None
    on_call: Callable[[Context], Awaitable[None]] | None = None
    clean_up_seconds: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Any] = field(default_factory=list)

    async def answer(self, request: CountTokensRequest, context: Context) -> CountTokensResponse:
        if self.on_call is not None:
            await self.on_call(context)
        return count(1)

    async def fail(self, request: CountTokensRequest, context: Context) -> CountTokensResponse:
        assert self.error is not None
        raise self.error

    async def abort(self, request: CountTokensRequest, context: Context) -> CountTokensResponse:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "an abort of the handler's own")
        return count(1)

    async def hang(self, request: CountTokensRequest, context: Context) -> CountTokensResponse:
        await self._hang()
        return count(1)

    async def stream(self, request: StreamGenerateRequest, context: Context) -> AsyncIterator[Any]:
        for text in ("a", "b", "c"):
            yield delta(text)

    async def write(self, request: StreamGenerateRequest, context: Context) -> None:
        for text in ("a", "b", "c"):
            await context.write(delta(text))

    async def stream_then_fail(self, request: StreamGenerateRequest, context: Context) -> AsyncIterator[Any]:
        yield delta("a")
        assert self.error is not None
        raise self.error

    async def stream_forever(self, request: StreamGenerateRequest, context: Context) -> AsyncIterator[Any]:
        try:
            while True:
                self.seen.append(asyncio.current_task())
                yield delta("a")
                await asyncio.sleep(0.001)
        finally:
            self.ended.set()

    async def stream_then_hang(self, request: StreamGenerateRequest, context: Context) -> AsyncIterator[Any]:
        yield delta("a")
        await self._hang()

    async def stream_then_finish(
        self, request: StreamGenerateRequest, context: Context
    ) -> AsyncIterator[Any]:
        yield delta("a")
        await asyncio.sleep(0.3)
        yield delta("b")

    async def flood(self, request: StreamGenerateRequest, context: Context) -> AsyncIterator[Any]:
        try:
            while True:
                yield delta("x" * 1024 * 1024)
        finally:
            self.ended.set()

    async def collect(self, requests: AsyncIterator[Any], context: Context) -> CountTokensResponse:
        return count(len([request async for request in requests]))

    async def echo(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            yield request

    async def _hang(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(self.clean_up_seconds)
            self.ended.set()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service, as a generated `add_…Servicer_to_server` does."""
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, self._handlers())])

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        unary = (CountTokensRequest.FromString, CountTokensResponse.SerializeToString)
        stream = (StreamGenerateRequest.FromString, StreamGenerateResponse.SerializeToString)
        echo = (StreamGenerateResponse.FromString, StreamGenerateResponse.SerializeToString)
        unary_unary = {"Answer": self.answer, "Fail": self.fail, "Abort": self.abort, "Hang": self.hang}
        unary_stream: dict[str, Any] = {
            "Stream": self.stream,
            "Write": self.write,
            "StreamThenFail": self.stream_then_fail,
            "StreamForever": self.stream_forever,
            "StreamThenHang": self.stream_then_hang,
            "StreamThenFinish": self.stream_then_finish,
            "Flood": self.flood,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect, *unary),
            "Echo": grpc.stream_stream_rpc_method_handler(self.echo, *echo),
        }
        for name, behaviour in unary_unary.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(behaviour, *unary)
        for name, behaviour in unary_stream.items():
            handlers[name] = grpc.unary_stream_rpc_method_handler(behaviour, *stream)
        return handlers
