"""Several streams read as one; knows nothing of what they carry."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) as items come, one item of each stream ahead at the most.

    All streams are closed with this one, and when any of them fails.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    reads = {asyncio.create_task(_next(stream)): number for number, stream in enumerate(streams)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                number, items = reads.pop(read), read.result()
                if items:
                    reads[asyncio.create_task(_next(streams[number]))] = number
                    yield number, items[0]
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T, None]) -> list[T]:
    """The next item, or nothing at the end."""
    try:
        return [await anext(stream)]
    except StopAsyncIteration:
        return []
