"""How neighbours fare while others misbehave: `make bench-pressure`.

A few steady callers stream answers from a running pair. Their latencies are measured alone, and then beside
each kind of trouble: a reader that stops reading, streams and calls that are cut, deadlines that can't be
met, more callers than the queue holds, a very long prompt. After each, everybody must have left the decoder,
and its memory must be where it was.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from tqdm import tqdm

from bench.decoder_metrics import DecoderMetrics
from bench.generated_checkpoint import write_generated_checkpoint
from demo.pair import Pair
from demo.ports import free_port
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc

NEIGHBOURS = 3
NEIGHBOUR_TOKENS = 24
QUEUE = 8
# Small enough to be in use as a whole after the warm-up: its pages come with their first use.
KV_CACHE_BYTES = 32 * 1024**2
CALLERS = 30
LEAVE_SECONDS = 1.0
RESULTS = Path(__file__).parent / "results" / "pressure.json"
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
    seconds_until_empty: float
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
        """Neighbours' latencies while the trouble is made again and again for so long."""
        before = self._process.memory_info().rss
        latencies, notes = Latencies(), [""]
        until = time.perf_counter() + seconds
        neighbours = [asyncio.create_task(self._ask_steadily(latencies, until)) for _ in range(NEIGHBOURS)]
        while time.perf_counter() < until:
            notes.append(await trouble(self))
        await asyncio.gather(*neighbours)
        empty = await self._until_empty()
        growth = (self._process.memory_info().rss - before) / 1e6
        return Outcome(name, latencies, empty, growth, notes[-1])

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
    ) -> "grpc.aio.UnaryStreamCall[Any, Any]":
        request = decoder_pb2.StreamGenerateRequest(task=_task(question, tokens))
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

    async def _until_empty(self) -> float:
        """Seconds until nobody runs or waits any more."""
        started = time.perf_counter()
        while time.perf_counter() - started < 10 * LEAVE_SECONDS:
            values = self._metrics.read()
            left = values["lenspair_decoder_requests_running"] + values["lenspair_decoder_requests_waiting"]
            if left == 0:
                break
            await asyncio.sleep(0.02)
        return time.perf_counter() - started

    async def close(self) -> None:
        await self._channel.close()


async def nothing(_: Pressure) -> str:
    await asyncio.sleep(0.1)
    return ""


async def stopped_reader(pressure: Pressure) -> str:
    """Reads one message of a long answer, and then no more until it is cut."""
    channel = pressure.narrow_channel()
    stub = decoder_pb2_grpc.DecoderServiceStub(channel)
    call = pressure.stream("A long answer, please.", 400, stub=stub)
    await call.read()
    await asyncio.sleep(2)
    call.cancel()
    await channel.close()
    return ""


async def cut_streams(pressure: Pressure) -> str:
    """B08: 200 streams, each cut after its first message."""

    async def cut(number: int) -> None:
        call = pressure.stream(f"Something long. ({number})", 300)
        try:
            await call.read()
        except grpc.aio.AioRpcError:
            return  # the queue is full: that is an answer too
        call.cancel()

    for first in range(0, 200, 10):
        await asyncio.gather(*(cut(first + number) for number in range(10)))
    return "200 streams cut after one message"


async def cut_calls(pressure: Pressure) -> str:
    """B08: calls that are cut after a moment."""
    calls = [asyncio.ensure_future(pressure.whole(f"Something long. ({n})", 300)) for n in range(20)]
    await asyncio.sleep(0.1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return ""


async def deadlines(pressure: Pressure) -> str:
    """100 requests with 20 ms each."""
    calls = [asyncio.ensure_future(pressure.whole(f"Quick! ({n})", 300, timeout=0.02)) for n in range(100)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    codes = [each.code().name for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    return ", ".join(f"{codes.count(code)} {code}" for code in sorted(set(codes)))


async def full_queue(pressure: Pressure) -> str:
    """B09: more callers than the batch and the queue hold."""
    refusals: list[float] = []

    async def ask(number: int) -> None:
        started = time.perf_counter()
        try:
            await pressure.whole(f"Something. ({number})", 60)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            refusals.append(time.perf_counter() - started)

    tasks = [asyncio.create_task(ask(number)) for number in range(CALLERS)]
    await asyncio.sleep(0.1)
    waiting = pressure.gauge("lenspair_decoder_requests_waiting")
    await asyncio.gather(*tasks)
    assert waiting <= QUEUE, waiting
    slowest = 1000 * max(refusals, default=0)
    return f"{len(refusals)} of {CALLERS} refused within {slowest:.0f} ms, {waiting:.0f} waiting"


async def long_prompt(pressure: Pressure) -> str:
    """A prompt of many steps."""
    await pressure.whole("a very long story " * 400, 4)
    return ""


TROUBLES: dict[str, Callable[[Pressure], Awaitable[str]]] = {
    "alone": nothing,
    "a reader that stops reading": stopped_reader,
    "streams cut after one message": cut_streams,
    "calls cut after 100 ms": cut_calls,
    "deadlines of 20 ms": deadlines,
    f"{CALLERS} callers, a queue of {QUEUE}": full_queue,
    "a very long prompt": long_prompt,
    "alone again": nothing,
}


async def measure(checkpoint: Path, seconds: float) -> list[Outcome]:
    """Every trouble in turn, on one decoder with a batch of eight."""
    port = free_port()
    own = {
        "LENSPAIR_METRICS_PORT": str(port),
        "LENSPAIR_MAX_WAITING": str(QUEUE),
        "LENSPAIR_MAX_BATCH_SIZE": "8",
        "LENSPAIR_KV_CACHE_BYTES": str(KV_CACHE_BYTES),
        "LENSPAIR_MAX_BATCH_TOKENS": "256",
        "LENSPAIR_TORCH_THREADS": "0",
    }
    with Pair(checkpoint, decoder_environment=own) as pair:
        pressure = Pressure(pair.decoder.address, DecoderMetrics(port), psutil.Process(pair.decoder.pid))
        await pressure.beside("warm-up", cut_streams, 6)
        bar = tqdm(TROUBLES.items(), desc="troubles", leave=False, disable=None)
        outcomes = [await pressure.beside(name, trouble, seconds) for name, trouble in bar]
        await pressure.close()
    return outcomes


def _task(question: str, tokens: int) -> decoder_pb2.GenerationTask:
    turn = decoder_pb2.Turn(role=decoder_pb2.ROLE_USER, parts=[decoder_pb2.Part(text=question)])
    return decoder_pb2.GenerationTask(
        turns=[turn], max_output_tokens=tokens, ignore_eos=True, return_token_ids=True
    )


def _row(outcome: Outcome) -> dict[str, float]:
    first, between = outcome.latencies.first, outcome.latencies.between
    return {
        "first_token_ms_p50": 1000 * statistics.median(first),
        "between_tokens_ms_p50": 1000 * statistics.median(between),
        "between_tokens_ms_p95": 1000 * statistics.quantiles(between, n=20)[-1],
        "seconds_until_empty": outcome.seconds_until_empty,
        "growth_mb": outcome.growth_mb,
    }


def report(outcomes: list[Outcome]) -> int:
    """Prints a line for each trouble; 1 when somebody stayed in the decoder."""
    rows = {outcome.name: _row(outcome) for outcome in outcomes}
    print(
        f"{'neighbours, beside':32} {'first':>8} {'token p50':>10} {'p95':>8} {'empty in':>9} {'memory':>9}"
    )
    for outcome in outcomes:
        row = rows[outcome.name]
        print(
            f"{outcome.name:32} {row['first_token_ms_p50']:5.0f} ms {row['between_tokens_ms_p50']:7.1f} ms "
            f"{row['between_tokens_ms_p95']:5.0f} ms {row['seconds_until_empty']:7.2f} s "
            f"{row['growth_mb']:+6.1f} MB  {outcome.note}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    rounded = {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}
    RESULTS.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    stayed = [o.name for o in outcomes if o.seconds_until_empty > LEAVE_SECONDS]
    if stayed:
        print(f"somebody stayed longer than {LEAVE_SECONDS:.0f} s after: {', '.join(stayed)}")
    return 1 if stayed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12, help="time for each trouble (default: 12)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
        write_generated_checkpoint(Path(folder), "dense")
        return report(asyncio.run(measure(Path(folder), arguments.seconds)))


if __name__ == "__main__":
    sys.exit(main())
