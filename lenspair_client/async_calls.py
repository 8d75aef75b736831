"""Runs flows on an event loop; holds no logic of requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc.aio
from google.protobuf.message import Message

from lenspair_client.effects import (
    CONCURRENT_FLOWS,
    Effect,
    Flow,
    Load,
    Method,
    Open,
    Read,
    Show,
    Sleep,
    Together,
    Unary,
    Upload,
)
from lenspair_client.errors import FailedCall, LenspairClientError, error_of
from lenspair_client.media import load
from lenspair_client.options import DECODER_SERVICE, ENCODER_SERVICE, ClientOptions, channel_options
from lenspair_client.tracing import trace_metadata
from shared.pb.lenspair.decoder.v1.decoder_pb2 import StreamGenerateRequest
from shared.pb.lenspair.decoder.v1.decoder_pb2_grpc import DecoderServiceStub
from shared.pb.lenspair.encoder.v1.encoder_pb2 import StreamEncodeRequest
from shared.pb.lenspair.encoder.v1.encoder_pb2_grpc import EncoderServiceStub

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """The value of a flow; the last thing that `AsyncCalls.steps` yields."""

    value: T


class AsyncCalls:
    """The channels to a pair."""

    def __init__(self, encoder: str, decoder: str, options: ClientOptions) -> None:
        self._metadata = options.metadata
        self._channels = (
            grpc.aio.insecure_channel(encoder, channel_options(ENCODER_SERVICE, options)),
            grpc.aio.insecure_channel(decoder, channel_options(DECODER_SERVICE, options)),
        )
        self._encoder: Any = EncoderServiceStub(self._channels[0])
        self._decoder: Any = DecoderServiceStub(self._channels[1])
        self._unary: dict[Method, Any] = {
            Method.ENCODE: self._encoder.Encode,
            Method.LOOK_UP: self._encoder.LookupFeatures,
            Method.GENERATE: self._decoder.Generate,
            Method.COUNT_TOKENS: self._decoder.CountTokens,
            Method.KEEP_ALIVE: self._encoder.KeepAlive,
            Method.EVICT: self._encoder.Evict,
            Method.DESCRIBE: self._encoder.DescribeFeatures,
            Method.STORE_STATS: self._encoder.GetStoreStats,
        }

    async def close(self) -> None:
        """Ends open calls and connections."""
        for channel in self._channels:
            await channel.close()

    async def run(self, flow: Flow[T]) -> T:
        """Runs a flow to its end."""
        async with aclosing(self.steps(flow)) as steps:
            async for step in steps:
                if isinstance(step, Returned):
                    return step.value
        raise AssertionError("a flow ends with a value or an error")

    async def steps(self, flow: Flow[T]) -> AsyncGenerator[str | Returned[T], None]:
        """Runs a flow, yielding what it shows and last its value; closing it ends the open call."""
        performer = _Performer(self)
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Show):
                    yield effect.text
                    effect = flow.send(None)
                    continue
                try:
                    result = await performer.perform(effect)
                except LenspairClientError as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as end:
            yield Returned(cast("T", end.value))
        finally:
            performer.close()
            flow.close()

    async def call(self, method: Method, request: Message, seconds: float) -> Any:
        """Makes a unary call."""
        return await self._unary[method](request, timeout=seconds, metadata=self._call_metadata())

    async def upload(self, chunks: Iterator[StreamEncodeRequest], seconds: float) -> Any:
        """Makes a StreamEncode call."""
        return await self._encoder.StreamEncode(chunks, timeout=seconds, metadata=self._call_metadata())

    def open(self, request: StreamGenerateRequest, timeout: float) -> Any:
        """Begins a StreamGenerate call."""
        return self._decoder.StreamGenerate(request, timeout=timeout, metadata=self._call_metadata())

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, *trace_metadata())


class _Performer:
    """Does what one flow asks for; holds the stream that it has open."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
        self._stream: Any = None

    async def perform(self, effect: Effect) -> Any:
        try:
            return await self._perform(effect)
        except grpc.aio.AioRpcError as error:
            raise error_of(cast("FailedCall", error)) from error

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Load(image):
                return await asyncio.to_thread(load, image)
            case Unary(method, request, timeout):
                return await self._calls.call(method, request, timeout)
            case Upload(chunks, timeout):
                return await self._calls.upload(chunks(), timeout)
            case Open(request, timeout):
                self.close()
                self._stream = self._calls.open(request, timeout)
            case Read():
                message = await self._stream.read()
                return None if message is grpc.aio.EOF else message
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Together(flows):
                return await self._together(flows)
            case Show():
                raise AssertionError("what is shown goes to the caller")
        return None

    async def _together(self, flows: Sequence[Flow[Any]]) -> list[Any]:
        places = asyncio.Semaphore(CONCURRENT_FLOWS)

        async def run(flow: Flow[Any]) -> Any:
            async with places:
                return await self._calls.run(flow)

        tasks = [asyncio.create_task(run(flow)) for flow in flows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
