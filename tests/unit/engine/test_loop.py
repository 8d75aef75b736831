"""The engine loop over a fake runner: who is answered, refused, let go, and in which step."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from decoder_service.engine.engine import EngineStats, Limits, RequestTimings
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.scheduler import Step
from shared.errors import Draining, InvalidRequest, PromptTooLong, QueueFull
from tests.unit.engine.fake_runner import STOP, FakeRunner, collect, engine_of, request, token_ids

PAD = 3


@asynccontextmanager
async def running(engine: EngineLoop) -> AsyncIterator[None]:
    """The engine runs, and is idle when the test is over."""
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        yield
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        await engine.close()


async def entered(runner: FakeRunner) -> None:
    await asyncio.to_thread(runner.entered.wait, 10)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the engine has no event for what tests look at
            await asyncio.sleep(0.001)


async def test_an_answer_goes_to_its_limit() -> None:
    engine = engine_of(FakeRunner())
    async with running(engine):
        outputs = await collect(engine, request("a"))
    assert token_ids(outputs) == [100, 101, 102, 103]
    assert [output.finish for output in outputs] == [None, None, None, "length"]


async def test_a_stop_token_ends_an_answer_and_is_no_part_of_it() -> None:
    runner = FakeRunner()
    runner.script["a"] = [7, STOP]
    engine = engine_of(runner)
    async with running(engine):
        outputs = await collect(engine, request("a"))
    assert token_ids(outputs) == [7, None]
    assert outputs[-1].finish == "stop"


async def test_ignore_eos_goes_on_past_the_stop_token() -> None:
    runner = FakeRunner()
    runner.script["a"] = [7, STOP]
    engine = engine_of(runner)
    async with running(engine):
        assert token_ids(await collect(engine, request("a", ignore_eos=True))) == [7, STOP, 102, 103]


async def test_simultaneous_requests_share_steps() -> None:
    """B16."""
    runner = FakeRunner()
    engine = engine_of(runner, size=8)
    async with running(engine):
        await asyncio.gather(*(collect(engine, request(str(n))) for n in range(8)))
    assert max(len(names) for names in runner.steps) == 8


async def test_the_short_answer_ends_while_the_long_one_goes_on_and_its_place_is_taken() -> None:
    """B19, G24."""
    runner = FakeRunner()
    engine = engine_of(runner, size=2)
    async with running(engine):
        long = asyncio.create_task(collect(engine, request("long", output=300)))
        await entered(runner)
        await collect(engine, request("short", output=3))
        await collect(engine, request("next", output=3))
        assert not long.done()
        assert len(await long) == 300


async def test_single_mode_runs_one_request_in_a_step() -> None:
    runner = FakeRunner()
    engine = engine_of(runner, size=1)
    async with running(engine):
        await asyncio.gather(*(collect(engine, request(str(n))) for n in range(3)))
    assert {len(names) for names in runner.steps} == {1}


async def test_the_queue_is_bounded_and_refuses_at_once() -> None:
    """B09."""
    runner = FakeRunner()
    runner.gate.clear()
    engine = engine_of(runner, size=2, waiting=8)
    async with running(engine):
        tasks = [asyncio.create_task(collect(engine, request(str(n)))) for n in range(30)]
        done, _ = await asyncio.wait(tasks, timeout=0.5)
        errors = [task.exception() for task in done]
        assert len(errors) == 20
        assert engine.stats().waiting == 8
        assert all(isinstance(error, QueueFull) and error.retry_after_seconds > 0 for error in errors)
        runner.gate.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(answer, list) for answer in answers) == 10


async def test_a_reader_who_leaves_frees_the_place_before_the_next_step() -> None:
    """B08."""
    runner = FakeRunner()
    engine = engine_of(runner)
    async with running(engine):
        async with aclosing(engine.generate(request("a", output=900), RequestTimings())) as outputs:
            await anext(outputs)
        assert engine.stats() == EngineStats(0, 0, 0, 0, 100)
        steps = len(runner.steps)
        await collect(engine, request("b"))
    assert all("a" not in names for names in runner.steps[steps + 1 :])


async def test_cancelled_requests_in_the_queue_are_never_computed() -> None:
    """B03, B07."""
    runner = FakeRunner()
    runner.gate.clear()
    engine = engine_of(runner, size=1, waiting=20)
    async with running(engine):
        first = asyncio.create_task(collect(engine, request("first")))
        await entered(runner)
        queued = [asyncio.create_task(collect(engine, request(str(n)))) for n in range(10)]
        await until(lambda: engine.stats().waiting == 10)
        for task in queued[:9]:
            task.cancel()
        await until(lambda: engine.stats().waiting == 1)
        runner.gate.set()
        await asyncio.gather(first, queued[9])
    assert {name for names in runner.steps for name in names} == {"first", "9"}


async def test_half_of_many_requests_leave_at_random_moments() -> None:
    """B03."""
    engine = engine_of(FakeRunner(), waiting=200)
    async with running(engine):
        tasks = [asyncio.create_task(collect(engine, request(str(n), output=20))) for n in range(100)]
        for number, task in enumerate(tasks[::2]):
            await asyncio.sleep(0.0004 * (number % 5))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answers = await asyncio.gather(*(collect(engine, request(f"n{n}")) for n in range(20)))
    assert all(len(answer) == 4 for answer in answers)


async def test_a_deadline_in_the_queue_ends_on_time() -> None:
    """B06: B gives up after its own time, whatever A does."""
    runner = FakeRunner()
    runner.gate.clear()
    engine = engine_of(runner, size=1)
    async with running(engine):
        first = asyncio.create_task(collect(engine, request("a")))
        await entered(runner)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collect(engine, request("b")), timeout=0.05)
        assert engine.stats().waiting == 0
        runner.gate.set()
        await first


async def test_bad_requests_fail_alone() -> None:
    """B01."""
    runner = FakeRunner()
    runner.refused.add("corrupt")
    engine = engine_of(runner)
    async with running(engine):
        answers = await asyncio.gather(
            collect(engine, request("good")),
            collect(engine, request("corrupt")),
            collect(engine, request("fine")),
            collect(engine, request("long", prompt=997)),
            return_exceptions=True,
        )
    assert [type(answer) for answer in answers] == [list, InvalidRequest, list, PromptTooLong]


@pytest.mark.parametrize(("prompt", "fits"), [(96, True), (97, False)])
async def test_the_context_is_exact(prompt: int, fits: bool) -> None:
    """G25."""
    engine = engine_of(FakeRunner(), context=100)
    async with running(engine):
        answers = await asyncio.gather(
            collect(engine, request("a", prompt=prompt, output=4)), return_exceptions=True
        )
    assert isinstance(answers[0], list) == fits
    if not fits:
        assert isinstance(answers[0], PromptTooLong)
        assert answers[0].metadata["text_tokens"] == "97"


async def test_the_context_is_never_more_than_the_cache_holds() -> None:
    assert engine_of(FakeRunner(), blocks=3, context=1000).context_tokens == 48


async def test_a_continuation_is_resumed_not_repeated() -> None:
    engine = engine_of(FakeRunner())
    async with running(engine):
        assert token_ids(await collect(engine, request("a", continuation=(100, 101)))) == [102, 103]


@pytest.mark.parametrize(
    ("continuation", "finish"), [((1, 2, 3, 4), "length"), ((1, STOP), "stop"), ((1, 2, 3, STOP), "stop")]
)
async def test_a_complete_continuation_ends_at_once(continuation: tuple[int, ...], finish: str) -> None:
    runner = FakeRunner()
    engine = engine_of(runner)
    async with running(engine):
        [output] = await collect(engine, request("a", continuation=continuation))
    assert (output.token_id, output.finish) == (None, finish)
    assert runner.steps == []


async def test_timings_are_filled_in_order() -> None:
    engine = engine_of(FakeRunner())
    timings = RequestTimings()
    async with running(engine):
        async for _ in engine.generate(request("a"), timings):
            pass
    assert timings.first_scheduled is not None
    assert timings.first_token is not None
    assert 0 < timings.submitted <= timings.first_scheduled <= timings.first_token


async def test_inputs_are_closed_once_a_request_has_ended() -> None:
    runner = FakeRunner()
    engine = engine_of(runner)
    async with running(engine):
        await collect(engine, request("a"))
        await collect(engine, request("b"))
        await until(lambda: not runner.opened)


async def test_close_ends_open_requests_and_refuses_new_ones() -> None:
    runner = FakeRunner()
    runner.gate.clear()
    engine = engine_of(runner, size=1)
    async with running(engine):
        tasks = [asyncio.create_task(collect(engine, request(str(n)))) for n in range(3)]
        await until(lambda: engine.stats().waiting == 2)
        closing = asyncio.create_task(engine.close())
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        runner.gate.set()
        await closing
        assert all(isinstance(answer, Draining) for answer in answers)
        with pytest.raises(Draining):
            await collect(engine, request("late"))


async def test_a_failing_step_ends_the_loop_and_every_request() -> None:
    def fail(_: Step) -> None:
        raise RuntimeError("the device is gone")

    runner = FakeRunner()
    runner.before_step = fail
    engine = engine_of(runner)
    loop = asyncio.create_task(engine.run())
    answers = await asyncio.gather(
        collect(engine, request("a")), collect(engine, request("b")), return_exceptions=True
    )
    assert all(isinstance(answer, Draining) for answer in answers)
    with pytest.raises(RuntimeError, match="the device is gone"):
        await loop
    with pytest.raises(Draining):
        await collect(engine, request("c"))


async def test_rows_that_end_at_different_places_keep_their_own_ends() -> None:
    """G24: two end tokens, one of which could be padding; no end is part of an answer."""
    runner = FakeRunner()
    runner.script |= {"a": [5, STOP], "b": [5, 6, 7, PAD], "c": [5] * 30}
    engine = engine_of(runner)
    limits = Limits(30, stop_token_ids=frozenset({STOP, PAD}))
    requests = [replace(request(name), limits=limits) for name in "abc"]
    async with running(engine):
        answers = await asyncio.gather(*(collect(engine, each) for each in requests))
    assert [token_ids(answer) for answer in answers] == [[5, None], [5, 6, 7, None], [5] * 30]
    assert [answer[-1].finish for answer in answers] == ["stop", "stop", "length"]


async def test_the_batch_size_is_seen_in_the_metrics() -> None:
    """B16: eight decodes at once after a warm one."""

    def steps_of(most: str) -> float:
        labels = {"mode": "batched", "le": most}
        return REGISTRY.get_sample_value("lenspair_decoder_batch_size_bucket", labels) or 0.0

    engine = engine_of(FakeRunner(), size=8)
    async with running(engine):
        await collect(engine, request("warm"))
        small, all_sizes = steps_of("2.0"), steps_of("+Inf")
        await asyncio.gather(*(collect(engine, request(str(n), output=20)) for n in range(8)))
    assert (steps_of("+Inf") - all_sizes) - (steps_of("2.0") - small) >= 15
