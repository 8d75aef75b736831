"""The troubles that callers make for a decoder; each says what came of it, or fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped, unused-ignore]
from grpc_status import rpc_status

from bench.pressure_neighbours import Pressure
from shared.pb.lenspair.decoder.v1 import decoder_pb2_grpc

BATCH, QUEUE, CALLERS = 8, 8, 30
LONG = 2000
CUTS, AT_ONCE = 200, 5
DEADLINES, DEADLINE_SECONDS = 100, 0.02
Trouble = Callable[[Pressure], Awaitable[str]]


class PressureFailed(Exception):
    """The decoder did not do what it must."""


async def nothing(_: Pressure) -> str:
    return ""


async def stopped_reader(pressure: Pressure) -> str:
    """Reads one message of a long answer, none for a while, and then the rest: it comes in few messages."""
    channel = pressure.narrow_channel()
    stub = decoder_pb2_grpc.DecoderServiceStub(channel)
    call = pressure.stream("A long answer, please.", 400, stub=stub, top_logprobs=20)
    messages = aiter(call)
    await anext(messages)
    await asyncio.sleep(2)
    sizes = [len(message.delta.token_ids) async for message in messages if message.HasField("delta")]
    await channel.close()
    _require(1 + sum(sizes) == 400, "a slow reader lost tokens")
    _require(max(sizes) > 1, "the stopped reader did not hold its stream up: it proves nothing")
    return f"then {max(sizes)} tokens in one message"


async def cut_streams(pressure: Pressure) -> str:
    """B08: streams that are cut after their first message, with a long answer still to come."""
    codes: list[grpc.StatusCode] = []

    async def cut(number: int) -> None:
        call = pressure.stream(f"Something long. ({number})", LONG)
        try:
            await call.read()
            call.cancel()
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())

    await _few_at_once(cut)
    _require_only(codes, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return f"{CUTS - len(codes)} streams cut after one message, {len(codes)} refused"


async def cut_calls(pressure: Pressure) -> str:
    """B08: unary calls that are cut after a moment."""
    codes: list[grpc.StatusCode] = []

    async def cut(number: int) -> None:
        call = asyncio.ensure_future(pressure.whole(f"Something long. ({number})", LONG))
        await asyncio.sleep(0.03)
        call.cancel()
        try:
            await call
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
        except asyncio.CancelledError:
            pass

    await _few_at_once(cut)
    _require_only(codes, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return f"{CUTS - len(codes)} calls cut, {len(codes)} refused"


async def deadlines(pressure: Pressure) -> str:
    """Requests that have next to no time."""
    calls = [
        asyncio.ensure_future(pressure.whole(f"Quick! ({n})", LONG, timeout=DEADLINE_SECONDS))
        for n in range(DEADLINES)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    codes = [each.code() for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    _require(len(codes) == DEADLINES, "a request outlived its deadline")
    _require_only(codes, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return f"{codes.count(grpc.StatusCode.DEADLINE_EXCEEDED)} of {DEADLINES} expired, the others refused"


async def full_queue(pressure: Pressure) -> str:
    """B09: more callers than the batch and the queue hold."""
    refusals: list[float] = []
    hints: list[float] = []

    async def ask(number: int) -> None:
        started = time.perf_counter()
        try:
            await pressure.whole(f"Something. ({number})", 60)
        except grpc.aio.AioRpcError as error:
            _require_only([error.code()], grpc.StatusCode.RESOURCE_EXHAUSTED)
            refusals.append(time.perf_counter() - started)
            hints.append(retry_seconds(error))

    asking = asyncio.gather(*map(ask, range(CALLERS)))
    waiting = 0.0
    while not asking.done():
        waiting = max(waiting, pressure.gauge("lenspair_decoder_requests_waiting"))
        await asyncio.sleep(0.02)
    await asking
    _require(waiting <= QUEUE, f"{waiting:.0f} were waiting")
    _require(len(refusals) >= CALLERS - BATCH - QUEUE, "the queue took more than it may")
    _require(min(hints) > 0, "a refusal did not say when to come back")
    slowest = 1000 * max(refusals)
    return f"{len(refusals)} of {CALLERS} refused within {slowest:.0f} ms, at most {waiting:.0f} waiting"


async def long_prompt(pressure: Pressure) -> str:
    """A prompt of many steps."""
    await pressure.whole("a very long story " * 400, 4)
    return ""


async def steady_queue(pressure: Pressure, seconds: float) -> str:
    """B13: a queue that is half full all the time: nobody waits much longer than his place in it takes."""
    waits: list[float] = []
    started = time.perf_counter()

    async def ask(number: int) -> None:
        while time.perf_counter() - started < seconds:
            response = await pressure.whole(f"Steadily. ({number}, {len(waits)})", 10 + 7 * (number % 5))
            waits.append(response.summary.queue_time.ToTimedelta().total_seconds())

    await asyncio.gather(*map(ask, range(BATCH + QUEUE // 2)))
    mean_wait = QUEUE / 2 / (len(waits) / (time.perf_counter() - started))
    _require(max(waits) < 10 * mean_wait, "somebody was passed by again and again")
    return (
        f"{len(waits)} answers, queue over throughput {1000 * mean_wait:.0f} ms, "
        f"longest wait {max(waits) / mean_wait:.2f} times that (B13: 1.5)"
    )


TROUBLES: dict[str, Trouble] = {
    "alone": nothing,
    "a reader that stops reading": stopped_reader,
    f"{CUTS} streams cut": cut_streams,
    f"{CUTS} calls cut": cut_calls,
    f"{DEADLINES} deadlines of {1000 * DEADLINE_SECONDS:.0f} ms": deadlines,
    f"{CALLERS} callers, a queue of {QUEUE}": full_queue,
    "a very long prompt": long_prompt,
    "alone again": nothing,
}


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """When a refusal says to come back; 0 when it does not say."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # has what a call has
    hint = error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        if detail.Unpack(hint):
            return float(hint.retry_delay.ToTimedelta().total_seconds())
    return 0.0


async def _few_at_once(act: Callable[[int], Awaitable[None]]) -> None:
    for first in range(0, CUTS, AT_ONCE):
        await asyncio.gather(*(act(first + number) for number in range(AT_ONCE)))


def _require_only(codes: Iterable[grpc.StatusCode], *allowed: grpc.StatusCode) -> None:
    others = sorted({code.name for code in codes} - {code.name for code in allowed})
    _require(not others, f"calls ended with {', '.join(others)}")


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise PressureFailed(problem)
