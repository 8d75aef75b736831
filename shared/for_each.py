"""One question about each of many things, a few at a time; knows neither the things nor who is asked."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def for_each(things: Sequence[S], ask: Callable[[S], Awaitable[T]], *, at_once: int) -> list[T]:
    """The answers, in the order of the things.

    The first error is everybody's: questions that are open then are cancelled, and no more are asked.
    """
    places = asyncio.Semaphore(at_once)

    async def ask_in_turn(thing: S) -> T:
        async with places:
            return await ask(thing)

    questions = [asyncio.create_task(ask_in_turn(thing)) for thing in things]
    try:
        return await asyncio.gather(*questions)
    finally:
        for question in questions:
            question.cancel()
