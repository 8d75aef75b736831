"""The engine loop: intake, schedule, run, apply, emit; knows neither tensors nor text.

Everything here happens on the event loop but the step itself, which runs on one thread of its own. The
scheduler's state changes only between awaits, so no lock is needed: a request that comes or goes while a
step runs is simply seen by the next one.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from decoder_service.engine import metrics
from decoder_service.engine.checks import check_length
from decoder_service.engine.engine import (
    EngineStats,
    GenerationRequest,
    Prompt,
    RequestTimings,
    TokenOutput,
)
from decoder_service.engine.sampling import Choice
from decoder_service.engine.scheduler import Advance, Scheduler, Step
from decoder_service.engine.sequence import Sequence
from shared.errors import Draining, LenspairError, QueueFull
from shared.features.bundle import FeatureBundle

RETRY_AFTER_SECONDS = 1.0


class StepRunner(Protocol):
    """Computes steps. `open`, `provide` and `run` are called on the model thread, `close` between steps."""

    def check(self, request: GenerationRequest) -> None:
        """Raises a LenspairError for a request that no step could compute; on any thread."""

    def check_features(self, prompt: Prompt, first: int, bundles: List[FeatureBundle]) -> None:
        """Raises a LenspairError for features that no step could compute with; on any thread."""

    def open(self, request: GenerationRequest) -> None:
        """Takes a request's inputs before the first step that names it."""

    def provide(self, request_id: str, first: int, bundles: List[FeatureBundle]) -> None:
        """Takes the features of an open request from number `first` of its prompt on."""

    def close(self, request_id: str) -> None:
        """Forgets a request's inputs; unknown ids are fine."""

    def run(self, step: Step) -> Mapping[str, Choice]:
        """The next token of each chunk that samples, by request id. Must not fail for one request."""


@dataclass(slots=True, eq=False)
class _Live:
    """A request between submission and its last output."""

    request: GenerationRequest
    timings: RequestTimings
    bundles: tuple[FeatureBundle, ...] = ()
    last_token: float | None = None
    _outputs: list[TokenOutput] = field(default_factory=list)
    _error: LenspairError | None = None
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._has_news.set()

    def fail(self, error: LenspairError) -> None:
        self._error = error
        self._has_news.set()

    async def next_outputs(self) -> tuple[TokenOutput, ...]:
        """All that has come since the last time; what came before an error is lost with it."""
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        outputs, self._outputs = tuple(self._outputs), []
        return outputs


class EngineLoop:
    """The Engine (see engine.py) that batches requests step by step. `run` must run for it to answer."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, *, context_tokens: int) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._context_tokens = min(context_tokens, scheduler.capacity_tokens)
        self._live: dict[str, _Live] = {}
        self._unopened: dict[str, _Live] = {}
        self._to_close: list[str] = []
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_open = True
        self._is_running = False
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    async def run(self) -> None:
        """Serves until `close`. Raises what a step raised: the engine is dead then, and says so."""
        self._is_running = True
        try:
            while await self._intake():
                step = self._scheduler.schedule()
                choices = await self._compute(step)
                advances = self._apply(step, choices)
                self._emit(advances, choices)
        finally:
            self._end()
            self._stopped.set()

    async def generate(
        self, request: GenerationRequest, timings: RequestTimings
    ) -> AsyncGenerator[tuple[TokenOutput, ...], None]:
        """See Engine. Further errors: PromptTooLong, InvalidRequest, FeatureRevisionMismatch, Draining."""
        timings.submitted = time.monotonic()
        check_length(request, self._context_tokens)
        sequence = _sequence_of(request)
        self._check_room(sequence)
        await asyncio.to_thread(self._runner.check, request)
        if sequence.finish is not None:
            yield (TokenOutput(None, finish=sequence.finish),)
            return
        try:
            live = _Live(request, timings, await request.features.load(0))
            await asyncio.to_thread(self._runner.check_features, request.prompt, 0, live.bundles)
            self._check_room(sequence)
            self._submit(sequence, live)
            outputs: tuple[TokenOutput, ...] = ()
            while not outputs or outputs[-1].finish is None:
                outputs = await live.next_outputs()
                request.features.release()
                yield outputs
        finally:
            request.features.release()
            self._leave(sequence.request_id)

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._scheduler.blocks_used,
            kv_blocks_cached=0,
            kv_blocks_total=self._scheduler.blocks_total,
        )

    async def close(self) -> None:
        """Ends every request that still runs with Draining, then the loop."""
        self._end()
        self._wake.set()
        if self._is_running:
            await self._stopped.wait()

    def _check_room(self, sequence: Sequence) -> None:
        if not self._is_open:
            raise Draining("this decoder shuts down")
        if not self._scheduler.can_add(sequence):
            raise QueueFull(
                f"{self._scheduler.num_waiting} requests wait already",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _submit(self, sequence: Sequence, live: _Live) -> None:
        self._scheduler.add(sequence)
        self._live[sequence.request_id] = live
        self._unopened[sequence.request_id] = live
        self._wake.set()
        metrics.observe_stats(self.stats())

    def _leave(self, request_id: str) -> None:
        """The reader of a request has gone, before the last output or after it."""
        if self._live.pop(request_id, None) is None:
            return
        metrics.ABANDONED.inc()
        self._retire(request_id)
        self._scheduler.remove(request_id)
        metrics.observe_stats(self.stats())

    def _retire(self, request_id: str) -> None:
        if self._unopened.pop(request_id, None) is None:
            self._to_close.append(request_id)

    async def _intake(self) -> bool:
        """Lets go of requests that have ended and waits for work; False when the engine closes."""
        while self._to_close:
            self._runner.close(self._to_close.pop())
        while self._is_open and not self._scheduler.has_work:
            self._wake.clear()
            await self._wake.wait()
        return self._is_open

    async def _compute(self, step: Step) -> Mapping[str, Choice]:
        now = time.monotonic()
        named = [chunk.request_id for chunk in step.chunks if chunk.request_id in self._unopened]
        opened = [self._unopened.pop(request_id) for request_id in named]
        for live in opened:
            live.timings.first_scheduled = now
            metrics.QUEUE_TIME.observe(now - live.timings.submitted)
        loop = asyncio.get_running_loop()
        choices = await loop.run_in_executor(self._model_thread, self._open_and_run, opened, step)
        metrics.observe_step(step, time.monotonic() - now)
        return choices

    def _open_and_run(self, opened: list[_Live], step: Step) -> Mapping[str, Choice]:
        for live in opened:
            self._runner.open(live.request)
            self._runner.provide(live.request.request_id, 0, live.bundles)
            live.bundles = ()
        return self._runner.run(step)

    def _apply(self, step: Step, choices: Mapping[str, Choice]) -> list[Advance]:
        tokens = {request_id: choice.token_id for request_id, choice in choices.items()}
        return self._scheduler.advance(step, tokens)

    def _emit(self, advances: list[Advance], choices: Mapping[str, Choice]) -> None:
        now = time.monotonic()
        for advance in advances:
            live = self._live[advance.request_id]
            _book_token(live, now)
            live.put(_output_of(advance, choices[advance.request_id]))
            if advance.finish is not None:
                del self._live[advance.request_id]
                self._retire(advance.request_id)
        metrics.observe_stats(self.stats())

    def _end(self) -> None:
        """Takes no more requests, and ends those that are open."""
        self._is_open = False
        for request_id, live in self._live.items():
            live.fail(Draining("this decoder shuts down"))
            self._scheduler.remove(request_id)
        self._live.clear()
        self._model_thread.shutdown(wait=False)


def _sequence_of(request: GenerationRequest) -> Sequence:
    limits = request.limits
    return Sequence.begin(
        request.request_id,
        request.prompt.token_ids,
        max_output_tokens=limits.max_output_tokens,
        stop_token_ids=frozenset() if limits.ignore_eos else limits.stop_token_ids,
        continuation=request.continuation,
    )


def _book_token(live: _Live, now: float) -> None:
    if live.last_token is None:
        live.timings.first_token = now
        metrics.TIME_TO_FIRST_TOKEN.observe(now - live.timings.submitted)
    else:
        metrics.INTER_TOKEN_LATENCY.observe(now - live.last_token)
    live.last_token = now


def _output_of(advance: Advance, choice: Choice) -> TokenOutput:
    if advance.finish == "stop":
        return TokenOutput(None, finish="stop")
    return TokenOutput(choice.token_id, choice.logprob, choice.top, advance.finish)
