"""A decoder with two places and a queue of eight: who waits, who is refused, who leaves, over real gRPC."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import psutil
import pytest
from PIL import Image

from bench.decoder_metrics import DecoderMetrics
from bench.pressure_neighbours import Pressure
from bench.pressure_troubles import QUEUE, retry_seconds
from demo.pair import Pair
from demo.ports import free_port
from lenspair_client import AsyncLenspairClient
from tests.rpc.servers import eventually

PLACES = 2
CALLERS = 30
LONG = 3000
WAITING = "lenspair_decoder_requests_waiting"
EXPIRED = grpc.StatusCode.DEADLINE_EXCEEDED
REFUSED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class Pressed:
    """A running pair whose decoder is small, and its metrics."""

    pair: Pair
    metrics: DecoderMetrics


@pytest.fixture(scope="module")
def pressed() -> Iterator[Pressed]:
    port = free_port()
    own = {
        "LENSPAIR_METRICS_PORT": str(port),
        "LENSPAIR_MAX_WAITING": str(QUEUE),
        "LENSPAIR_MAX_BATCH_SIZE": str(PLACES),
    }
    with Pair(decoder_environment=own) as pair:
        yield Pressed(pair, DecoderMetrics(port))


@pytest.fixture
async def callers(pressed: Pressed) -> AsyncIterator[Pressure]:
    decoder = pressed.pair.decoder
    made = Pressure(decoder.address, pressed.metrics, psutil.Process(decoder.pid))
    yield made
    await made.close()
    assert await pressed.metrics.is_empty_within(1.0)


async def test_a_deadline_in_the_queue_ends_on_time_whatever_runs(callers: Pressure) -> None:
    """B06."""
    running = [callers.stream(f"Long. ({n})", LONG) for n in range(PLACES)]
    for call in running:
        await call.read()
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await callers.whole("Short.", 3, timeout=0.5)
    assert caught.value.code() is EXPIRED
    assert abs(time.monotonic() - started - 0.5) < 0.1
    assert not any(call.done() for call in running)
    for call in running:
        call.cancel()


@pytest.mark.parametrize("is_stream", [True, False])
async def test_who_is_too_many_is_refused_at_once_and_told_when_to_come_back(
    callers: Pressure, *, is_stream: bool
) -> None:
    """B09: refusals come while everybody who was taken is still at work."""
    running = [callers.stream(f"Long. ({n})", LONG) for n in range(PLACES)]
    for call in running:
        await call.read()

    async def ask(number: int) -> grpc.aio.AioRpcError | None:
        try:
            if is_stream:
                async for _ in callers.stream(f"Short. ({number})", 3):
                    pass
            else:
                await callers.whole(f"Short. ({number})", 3)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    tasks = [asyncio.create_task(ask(number)) for number in range(CALLERS)]
    for refused, finished in enumerate(asyncio.as_completed(tasks), start=1):
        error = await finished
        assert error is not None
        assert error.code() is REFUSED
        assert retry_seconds(error) > 0
        if refused == CALLERS - QUEUE:
            break
    await eventually(lambda: callers.gauge(WAITING) == QUEUE)
    assert not any(call.done() for call in running)
    for call in running:
        call.cancel()
    answers = await asyncio.gather(*tasks)
    assert sum(answer is None for answer in answers) == QUEUE


async def test_a_short_answer_ends_while_the_long_one_goes_on(callers: Pressure) -> None:
    """B19, G24: and its place is taken by the next."""
    long = callers.stream("Long.", LONG)
    await long.read()
    for number in range(5):
        assert (await callers.whole(f"Short. ({number})", 5)).summary.output_tokens == 5
    assert not long.done()
    long.cancel()


async def test_calls_that_are_cut_leave_nothing_behind(pressed: Pressed, callers: Pressure) -> None:
    """B08: streams after one message, unary calls while they run, and in the queue."""

    async def cut(number: int) -> None:
        stream = callers.stream(f"Long. ({number})", LONG)
        whole = asyncio.ensure_future(callers.whole(f"Long, too. ({number})", LONG))
        await asyncio.sleep(0.01)
        whole.cancel()
        await stream.read()
        stream.cancel()
        await asyncio.gather(whole, return_exceptions=True)

    async def cut_many() -> int:
        for _ in range(25):
            await asyncio.gather(*map(cut, range(4)))
        assert await pressed.metrics.is_empty_within(1.0)
        return psutil.Process(pressed.pair.decoder.pid).memory_info().rss

    warm = await cut_many()
    assert await cut_many() < warm + 16 * 1024**2


async def test_half_leave_at_random_moments_and_everybody_after_them_is_answered(callers: Pressure) -> None:
    """B03."""

    async def leave(number: int) -> None:
        call = asyncio.ensure_future(callers.whole(f"Something. ({number})", 20))
        if number % 2:
            await asyncio.sleep(0.004 * (number % 6))
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    for first in range(0, 100, PLACES + QUEUE):
        await asyncio.gather(*(leave(first + number) for number in range(PLACES + QUEUE)))
    answers = [await callers.whole(f"Afterwards. ({number})", 4) for number in range(20)]
    assert all(answer.summary.output_tokens == 4 for answer in answers)


def solid(colour: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (128, 128), colour).save(data, "PNG")
    return data.getvalue()


async def test_pictures_of_one_colour_do_not_blend_at_any_batch_size(pressed: Pressed, pair: Pair) -> None:
    """G06: one at a time, two at a time (all that this decoder takes), four at a time."""

    async def ask(of: Pair, at_once: int) -> list[str]:
        places = asyncio.Semaphore(at_once)
        async with AsyncLenspairClient(of.encoder.address, of.decoder.address) as client:

            async def one(colour: str) -> str:
                async with places:
                    return (await client.ask("Describe the picture.", [solid(colour)])).text

            return list(await asyncio.gather(*map(one, ("red", "green", "blue", "yellow"))))

    alone = await ask(pair, 1)
    assert len(set(alone)) > 1
    assert await ask(pressed.pair, 2) == alone
    assert await ask(pair, 4) == alone
