"""Runs flows with blocking calls; holds no logic of requests."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from threading import Event
from typing import Any, TypeVar, cast

import grpc
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


class BlockingCalls:
    """The channels to a pair."""

    def __init__(self, encoder: str, decoder: str, options: ClientOptions) -> None:
        self._metadata = options.metadata
        self._channels = (
            grpc.insecure_channel(encoder, channel_options(ENCODER_SERVICE, options)),
            grpc.insecure_channel(decoder, channel_options(DECODER_SERVICE, options)),
        )
        self._encoder = EncoderServiceStub(self._channels[0])
        self._decoder = DecoderServiceStub(self._channels[1])
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

    def close(self) -> None:
        """Ends open calls and connections."""
        for channel in self._channels:
            channel.close()

    def run(self, flow: Flow[T], group: "_Group | None" = None) -> T:
        """Runs a flow to its end, or until its group is given up."""
        steps = self.steps(flow, group)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            return cast("T", end.value)

    def steps(self, flow: Flow[T], group: "_Group | None" = None) -> Generator[str, None, T]:
        """Runs a flow, yielding what it shows; closing the generator ends the flow's open call."""
        performer = _Performer(self, group or _Group())
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Show):
                    yield effect.text
                    effect = flow.send(None)
                    continue
                try:
                    result = performer.perform(effect)
                except LenspairClientError as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as end:
            return cast("T", end.value)
        finally:
            performer.close()
            flow.close()

    def call(self, method: Method, request: Message, timeout: float) -> Any:
        """Begins a unary call."""
        return self._unary[method].future(request, timeout=timeout, metadata=self._call_metadata())

    def upload(self, chunks: Iterator[StreamEncodeRequest], timeout: float) -> Any:
        """Begins a StreamEncode call."""
        return self._encoder.StreamEncode.future(chunks, timeout=timeout, metadata=self._call_metadata())

    def open(self, request: StreamGenerateRequest, timeout: float) -> Any:
        """Begins a StreamGenerate call."""
        return self._decoder.StreamGenerate(request, timeout=timeout, metadata=self._call_metadata())

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, *trace_metadata())


class _Group:
    """Flows that run side by side: when one has failed, the waits and the open calls of all end."""

    def __init__(self) -> None:
        self._is_given_up = Event()
        self._calls: set[Any] = set()

    def give_up(self) -> None:
        self._is_given_up.set()
        for call in list(self._calls):
            call.cancel()

    def check(self) -> None:
        if self._is_given_up.is_set():
            raise LenspairClientError("given up: another step of the request has failed")

    def wait(self, seconds: float) -> None:
        self._is_given_up.wait(seconds)

    def response(self, call: Any) -> Any:
        self._calls.add(call)
        try:
            self.check()
            return call.result()
        except grpc.FutureCancelledError as error:
            raise error_of(cast("FailedCall", call)) from error
        finally:
            self._calls.discard(call)
            call.cancel()


class _Performer:
    """Does what one flow asks for; holds the stream that it has open."""

    def __init__(self, calls: BlockingCalls, group: _Group) -> None:
        self._calls = calls
        self._group = group
        self._stream: Any = None

    def perform(self, effect: Effect) -> Any:
        self._group.check()
        try:
            return self._perform(effect)
        except grpc.RpcError as error:
            raise error_of(cast("FailedCall", error)) from error

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Load(image):
                return load(image)
            case Unary(method, request, timeout):
                return self._group.response(self._calls.call(method, request, timeout))
            case Upload(chunks, timeout):
                return self._group.response(self._calls.upload(chunks(), timeout))
            case Open(request, timeout):
                self.close()
                self._stream = self._calls.open(request, timeout)
            case Read():
                return next(self._stream, None)
            case Sleep(seconds):
                self._group.wait(seconds)
            case Together(flows):
                return self._together(flows)
            case Show():
                raise AssertionError("what is shown goes to the caller")
        return None

    def _together(self, flows: Sequence[Flow[Any]]) -> list[Any]:
        if len(flows) <= 1:
            return [self._calls.run(flow) for flow in flows]
        with ThreadPoolExecutor(CONCURRENT_FLOWS) as threads:
            # Each thread has the caller's context variables: its trace goes on there.
            group = _Group()
            runs = [threads.submit(copy_context().run, self._calls.run, flow, group) for flow in flows]
            try:
                for run in as_completed(runs):  # whichever fails first ends them all
                    run.result()
                return [run.result() for run in runs]
            except BaseException:
                group.give_up()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
