"""One question about each of many things: in order, a few at a time, and none after the first error."""

import asyncio

import pytest

from shared.for_each import for_each


async def test_answers_come_in_order_and_only_a_few_are_asked_at_once() -> None:
    open_now, most = 0, 0

    async def ask(thing: int) -> int:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(10 - thing):
            await asyncio.sleep(0)
        open_now -= 1
        return thing * thing

    assert await for_each(range(10), ask, at_once=3) == [thing * thing for thing in range(10)]
    assert most == 3


async def test_the_first_error_ends_all_other_questions() -> None:
    asked: list[int] = []
    ended: list[int] = []

    async def ask(thing: int) -> None:
        asked.append(thing)
        if thing == 1:
            raise ValueError
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(thing)

    with pytest.raises(ValueError, match=r"^$"):
        await for_each(range(100), ask, at_once=3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted([1, *ended]) == asked
    assert len(asked) <= 4  # the place of the failed one may have been taken
    assert len(asyncio.all_tasks()) == 1


async def test_nothing_is_asked_about_nothing() -> None:
    async def ask(_thing: object) -> None:
        raise AssertionError

    assert await for_each([], ask, at_once=1) == []
