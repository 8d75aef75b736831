"""Several streams as one: everything arrives, in each one's order, and everything is closed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from decoder_service.merging import merge


class Stream:
    """Yields `items`, one each time that `gate` lets it; fails with `error` after them."""

    def __init__(self, *items: int, error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_closed = False

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await self.gate.wait()
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_everything_arrives_in_each_stream_s_order(count: int) -> None:
    streams = [Stream(*range(number + 3)) for number in range(count)]
    got: dict[int, list[int]] = {number: [] for number in range(count)}
    async for number, item in merge([stream.read() for stream in streams]):
        got[number].append(item)
    assert got == {number: list(range(number + 3)) for number in range(count)}
    assert all(stream.is_closed for stream in streams)


async def test_a_slow_stream_does_not_hold_up_the_others() -> None:
    slow, quick = Stream(1), Stream(1, 2, 3)
    slow.gate.clear()
    got = []
    async for number, item in merge([slow.read(), quick.read()]):
        got.append((number, item))
        if len(got) == 3:
            slow.gate.set()
    assert got == [(1, 1), (1, 2), (1, 3), (0, 1)]


@pytest.mark.parametrize("count", [1, 3])
async def test_when_one_fails_all_are_closed(count: int) -> None:
    streams = [Stream(1, 2, error=ValueError("broken")), *(Stream(*range(100)) for _ in range(count - 1))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([stream.read() for stream in streams]):
            pass
    assert all(stream.is_closed for stream in streams)


@pytest.mark.parametrize("count", [1, 3])
async def test_when_the_reader_leaves_all_are_closed(count: int) -> None:
    streams = [Stream(*range(100)) for _ in range(count)]
    async with aclosing(merge([stream.read() for stream in streams])) as merged:
        await anext(merged)
    assert all(stream.is_closed for stream in streams)
