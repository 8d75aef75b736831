"""Steady callers of a running decoder: their latencies, and what it costs them when others misbehave."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from bench.decoder_metrics import DecoderMetrics
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc

NEIGHBOURS = 3
NEIGHBOUR_TOKENS = 24
LEAVE_SECONDS = 1.0
# Troubles come at a rate, not back to back: what they cost others is asked, not how much work there is.
PERIOD_SECONDS = 3.0
# What a caller whose connection is full gets no more of: less than one answer.
_NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@dataclass(slots=True)
class Latencies:
    """Seconds of steady callers: to each first token, and between the tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What happened beside one kind of trouble."""

    name: str
    latencies: Latencies
    has_emptied: bool
    growth_mb: float
    note: str = ""


class Pressure:
    """Troubles a decoder, and watches it and its neighbours."""

    def __init__(self, address: str, metrics: DecoderMetrics, process: psutil.Process) -> None:
        self._address = address
        self._metrics = metrics
        self._process = process
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = decoder_pb2_grpc.DecoderServiceStub(self._channel)

    async def beside(
        self, name: str, trouble: Callable[["Pressure"], Awaitable[str]], seconds: float
    ) -> Outcome:
        """Neighbours' latencies while the trouble is made once every period, for so long."""
        before = self._process.memory_info().rss
        latencies, notes = Latencies(), [""]
        until = time.perf_counter() + seconds
        neighbours = [asyncio.create_task(self._ask_steadily(latencies, until)) for _ in range(NEIGHBOURS)]
        while time.perf_counter() < until:
            pause = asyncio.create_task(asyncio.sleep(PERIOD_SECONDS))
            notes.append(await trouble(self))
            await pause
        await asyncio.gather(*neighbours)
        has_emptied = await self._metrics.is_empty_within(LEAVE_SECONDS)
        growth = (self._process.memory_info().rss - before) / 1e6
        return Outcome(name, latencies, has_emptied, growth, notes[-1])

    async def _ask_steadily(self, latencies: Latencies, until: float) -> None:
        number = 0
        while time.perf_counter() < until:
            number += 1
            try:
                await self._ask(latencies, number)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.1)  # refused like everybody: it comes back

    async def _ask(self, latencies: Latencies, number: int) -> None:
        started = last = time.perf_counter()
        is_first = True
        async for message in self.stream(f"A steady question. ({number})", NEIGHBOUR_TOKENS):
            if message.HasField("delta"):
                now = time.perf_counter()
                (latencies.first if is_first else latencies.between).append(
                    now - (started if is_first else last)
                )
                is_first, last = False, now

    def stream(
        self,
        question: str,
        tokens: int,
        *,
        stub: Any = None,
        timeout: float = 60,
        top_logprobs: int = 0,
    ) -> "grpc.aio.UnaryStreamCall[Any, Any]":
        task = _task(question, tokens, top_logprobs)
        request = decoder_pb2.StreamGenerateRequest(task=task)
        call: grpc.aio.UnaryStreamCall[Any, Any] = (stub or self._stub).StreamGenerate(
            request, timeout=timeout
        )
        return call

    def whole(
        self, question: str, tokens: int, timeout: float = 60
    ) -> Awaitable[decoder_pb2.GenerateResponse]:
        request = decoder_pb2.GenerateRequest(task=_task(question, tokens))
        call: Awaitable[decoder_pb2.GenerateResponse] = self._stub.Generate(request, timeout=timeout)
        return call

    def narrow_channel(self) -> grpc.aio.Channel:
        """A connection of its own that holds little of what nobody reads."""
        return grpc.aio.insecure_channel(self._address, options=_NARROW)

    def gauge(self, name: str) -> float:
        return self._metrics.read()[name]

    async def close(self) -> None:
        await self._channel.close()


def _task(question: str, tokens: int, top_logprobs: int = 0) -> decoder_pb2.GenerationTask:
    turn = decoder_pb2.Turn(role=decoder_pb2.ROLE_USER, parts=[decoder_pb2.Part(text=question)])
    return decoder_pb2.GenerationTask(
        turns=[turn],
        max_output_tokens=tokens,
        ignore_eos=True,
        return_token_ids=True,
        top_logprobs=top_logprobs or None,
    )
