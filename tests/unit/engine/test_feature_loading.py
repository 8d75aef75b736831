"""When the engine fetches features, what happens when that fails, and who lets go of them when."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoder_service.engine.engine import GenerationRequest, Prompt, RequestTimings
from decoder_service.engine.model_runner import memory_errors
from decoder_service.engine.scheduler import Step
from shared.errors import FeatureNotFound, OutOfMemory
from shared.features.bundle import FeatureBundle
from tests.unit.engine.fake_runner import FakeRunner, collect, engine_of, request, token_ids
from tests.unit.engine.test_loop import entered, running, until


class SlowTensors:
    """Tensors that come when `gate` opens, or not at all; counts loads and what is held."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate = asyncio.Event()
        self.error = error
        self.loads: list[int] = []
        self.is_held = False
        self.was_cancelled = False

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        self.loads.append(first)
        self.is_held = True
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return ()

    def release(self) -> None:
        self.is_held = False


def pictured(
    name: str, tensors: Any, *, prompt: int = 40, output: int = 4, feature_id: bytes = b"red"
) -> GenerationRequest:
    """A question about one picture of 32 tokens, which stands first."""
    asked = request(name, prompt=prompt, output=output)
    spans = (((0, 32),),)
    return replace(
        asked,
        prompt=Prompt(asked.prompt.token_ids, asked.prompt.positions, prompt, spans),
        features=tensors,
        feature_ids=(feature_id,),
    )


async def test_others_are_answered_while_one_waits_for_its_features() -> None:
    tensors = SlowTensors()
    engine = engine_of(FakeRunner(), size=1)
    async with running(engine):
        waiting = asyncio.create_task(collect(engine, pictured("a", tensors)))
        await until(lambda: bool(tensors.loads))
        assert len(await collect(engine, request("b"))) == 4
        assert not waiting.done()
        tensors.gate.set()
        assert token_ids(await waiting) == [100, 101, 102, 103]


async def test_a_picture_that_the_cache_covers_is_not_fetched() -> None:
    first, second = SlowTensors(), SlowTensors()
    first.gate.set()
    engine = engine_of(FakeRunner())
    timings = RequestTimings()
    async with running(engine):
        await collect(engine, pictured("a", first))
        async for _ in engine.generate(pictured("b", second), timings):
            pass
    assert (first.loads, second.loads) == ([0], [])
    assert timings.reused_tokens == 32


async def test_features_are_let_go_with_the_first_token() -> None:
    tensors = SlowTensors()
    tensors.gate.set()
    engine = engine_of(FakeRunner())
    async with (
        running(engine),
        aclosing(engine.generate(pictured("a", tensors), RequestTimings())) as outputs,
    ):
        await anext(outputs)
        assert not tensors.is_held


@pytest.mark.parametrize("error", [FeatureNotFound(["key"]), RuntimeError("a bug")])
async def test_a_failed_fetch_ends_its_request_alone(error: Exception) -> None:
    tensors = SlowTensors(error)
    runner = FakeRunner()
    engine = engine_of(runner)
    async with running(engine):
        failing = asyncio.create_task(collect(engine, pictured("a", tensors)))
        neighbour = asyncio.create_task(collect(engine, request("b", output=50)))
        await entered(runner)
        tensors.gate.set()
        with pytest.raises(type(error)):
            await failing
        assert len(await neighbour) == 50
        assert not tensors.is_held
    assert "a" not in {name for names in runner.steps for name in names}


async def test_who_leaves_while_fetching_stops_the_fetch() -> None:
    """B05."""
    tensors = SlowTensors()
    engine = engine_of(FakeRunner())
    async with running(engine):
        leaving = asyncio.create_task(collect(engine, pictured("a", tensors)))
        await until(lambda: bool(tensors.loads))
        leaving.cancel()
        await asyncio.wait({leaving})
        await until(lambda: tensors.was_cancelled)
        assert not tensors.is_held


async def test_a_preempted_request_fetches_again_what_the_cache_has_lost_and_goes_on() -> None:
    """Two answers that do not fit together: the later one is interrupted, and its answer is still whole."""
    tensors = SlowTensors()
    tensors.gate.set()
    runner = FakeRunner()
    engine = engine_of(runner, blocks=6)
    async with running(engine):
        first = asyncio.create_task(collect(engine, request("a", prompt=16, output=80)))
        await entered(runner)
        second = asyncio.create_task(collect(engine, pictured("b", tensors, output=40)))
        answers = await asyncio.gather(first, second)
        assert engine.stats().preempted > 0
    assert [token_ids(each) for each in answers] == [list(range(100, 180)), list(range(100, 140))]
    assert tensors.loads == [0, 0]


async def test_features_that_have_gone_by_then_end_the_answer_behind_what_was_sent() -> None:
    tensors = SlowTensors()
    tensors.gate.set()
    runner = FakeRunner()
    engine = engine_of(runner, blocks=6)
    outputs: list[int | None] = []

    async def read() -> None:
        async for stretch in engine.generate(pictured("b", tensors, output=40), RequestTimings()):
            outputs.extend(token_ids(list(stretch)))
            tensors.error = FeatureNotFound(["key"])

    async with running(engine):
        first = asyncio.create_task(collect(engine, request("a", prompt=16, output=80)))
        await entered(runner)
        with pytest.raises(FeatureNotFound):
            await read()
        assert len(await first) == 80
    assert outputs == list(range(100, 100 + len(outputs)))
    assert outputs


def more_than(limit: Callable[[Step], bool]) -> Callable[[Step], None]:
    def run(step: Step) -> None:
        if limit(step):
            raise OutOfMemory("the device has too little memory")

    return run


async def test_steps_that_are_too_large_are_split_and_everybody_is_answered() -> None:
    """B11: at most three requests at a time, at most ten tokens."""
    runner = FakeRunner()
    runner.before_step = more_than(lambda step: len(step.chunks) > 3 or step.num_tokens > 10)
    engine = engine_of(runner, size=8)
    async with running(engine):
        answers = await asyncio.gather(
            *(collect(engine, request(str(n), prompt=30, output=12)) for n in range(8))
        )
    assert [token_ids(answer) for answer in answers] == [list(range(100, 112))] * 8
    assert max(len(names) for names in runner.steps) == 3


def test_torch_s_memory_errors_are_told_from_others() -> None:
    """B11: a real allocation that no machine can make, a device's own error, and a bug."""
    with pytest.raises(OutOfMemory), memory_errors():
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(OutOfMemory), memory_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        raise RuntimeError("shape mismatch")


async def test_what_can_t_be_computed_even_alone_ends_and_the_next_one_runs() -> None:
    """B11."""
    runner = FakeRunner()
    runner.before_step = more_than(lambda step: any(chunk.request_id == "big" for chunk in step.chunks))
    engine = engine_of(runner)
    async with running(engine):
        with pytest.raises(OutOfMemory):
            await collect(engine, request("big"))
        assert len(await collect(engine, request("small"))) == 4


async def test_a_reader_that_stops_reading_delays_nobody_and_gets_all_at_once() -> None:
    """G: its answer is complete, its place free, and it finds everything in one go."""
    engine = engine_of(FakeRunner(), size=1)
    async with running(engine):
        stream = engine.generate(request("slow", output=50), RequestTimings())
        first = await anext(stream)
        assert len(await collect(engine, request("b"))) == 4  # needs the only place
        rest = await anext(stream)
        assert token_ids([*first, *rest]) == list(range(100, 150))
        await stream.aclose()


async def test_the_mode_is_switched_while_requests_run() -> None:
    runner = FakeRunner()
    engine = engine_of(runner, size=4, waiting=20)
    async with running(engine):
        await asyncio.gather(*(collect(engine, request(f"a{n}")) for n in range(4)))
        engine.use_mode("single")
        before = len(runner.steps)
        await asyncio.gather(*(collect(engine, request(f"b{n}")) for n in range(4)))
        single = runner.steps[before:]
        engine.use_mode("batched")
        before = len(runner.steps)
        await asyncio.gather(*(collect(engine, request(f"c{n}")) for n in range(4)))
    assert {len(names) for names in single} == {1}
    assert max(len(names) for names in runner.steps[before:]) > 1
