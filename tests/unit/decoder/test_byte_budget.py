"""Bytes that are held together stay under the limit, in the order of asking, whoever gives up."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from decoder_service.byte_budget import ByteBudget
from shared.errors import QueueFull


async def _holder(budget: ByteBudget, size: int, done: asyncio.Event, order: list[int]) -> None:
    async with budget.hold(size):
        order.append(size)
        await done.wait()


async def test_those_that_fit_do_not_wait() -> None:
    budget = ByteBudget(10, max_waiting=3)
    async with budget.hold(4), budget.hold(6):
        assert budget.held == 10
    assert budget.held == 0


async def test_first_come_first_served() -> None:
    budget, done, order = ByteBudget(10, max_waiting=3), asyncio.Event(), []  # type: ignore[var-annotated]
    async with AsyncExitStack() as first:
        await first.enter_async_context(budget.hold(8))
        waiting = [asyncio.create_task(_holder(budget, size, done, order)) for size in (5, 1, 2)]
        await asyncio.sleep(0)
        assert order == [], "a small one must not overtake a large one"
    await asyncio.sleep(0)
    assert order == [5, 1, 2]
    done.set()
    await asyncio.gather(*waiting)
    assert budget.held == 0


async def test_one_above_the_limit_is_served_alone() -> None:
    budget = ByteBudget(10, max_waiting=3)
    async with budget.hold(50):
        assert budget.held == 50
    assert budget.held == 0


async def test_who_gives_up_lets_others_pass() -> None:
    budget, done, order = ByteBudget(10, max_waiting=3), asyncio.Event(), []  # type: ignore[var-annotated]
    async with budget.hold(8):
        large = asyncio.create_task(_holder(budget, 9, done, order))
        small = asyncio.create_task(_holder(budget, 2, done, order))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.wait({large})
        assert order == [2]
    done.set()
    await small
    assert budget.held == 0


async def test_a_turn_that_comes_with_the_cancellation_is_given_back() -> None:
    budget, order = ByteBudget(10, max_waiting=3), []  # type: ignore[var-annotated]
    stack = AsyncExitStack()
    await stack.enter_async_context(budget.hold(8))
    waiting = asyncio.create_task(_holder(budget, 9, asyncio.Event(), order))
    await asyncio.sleep(0)
    await stack.aclose()  # its turn has come, but the task has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.held == 0


async def test_a_full_line_refuses_at_once() -> None:
    budget, done, order = ByteBudget(10, max_waiting=1), asyncio.Event(), []  # type: ignore[var-annotated]
    async with budget.hold(10):
        waiting = asyncio.create_task(_holder(budget, 1, done, order))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await _holder(budget, 1, done, order)
    done.set()
    await waiting
    assert order == [1]
