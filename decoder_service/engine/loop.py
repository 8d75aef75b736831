"""The engine loop: intake, schedule, run, apply, emit; knows neither tensors nor text.

Everything here happens on the event loop but the step itself, which runs on one thread of its own. The
scheduler's state changes only between awaits, so no lock is needed: a request that comes or goes while a
step runs is simply seen by the next one. Features are fetched beside the steps, for who needs them.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from decoder_service.engine import metrics
from decoder_service.engine.checks import check_feature_ids, check_length
from decoder_service.engine.engine import (
    EngineStats,
    GenerationRequest,
    Prompt,
    RequestTimings,
    TokenOutput,
)
from decoder_service.engine.live import LiveRequest, Loaded
from decoder_service.engine.sampling import Choice, Outcome
from decoder_service.engine.scheduler import Advance, Scheduler, Step
from decoder_service.engine.sequence import Sequence
from shared.errors import Draining, LenspairError, OutOfMemory, QueueFull
from shared.features.bundle import FeatureBundle

RETRY_AFTER_SECONDS = 1.0

Mode = Literal["batched", "single"]


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

    def run(self, step: Step) -> Mapping[str, Outcome]:
        """The next token of each chunk that samples, by request id, or the error that ends the request.

        Raises OutOfMemory when the device has too little for the step; a smaller one may follow.
        """


class EngineLoop:
    """The Engine (see engine.py) that batches requests step by step. `run` must run for it to answer."""

    def __init__(self, runner: StepRunner, scheduler: Scheduler, *, context_tokens: int) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._batched_limits = scheduler.limits
        self._context_tokens = min(context_tokens, scheduler.capacity_tokens)
        self._live: dict[str, LiveRequest] = {}
        self._to_close: list[str] = []
        self._loads: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._is_open = True
        self._is_running = False
        self._mode: Mode = "batched"
        self._observed = self.stats()
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    def use_mode(self, mode: Mode) -> None:
        """From the next step on; "single" admits one request at a time. Who runs goes on running."""
        limits = self._batched_limits
        self._mode = mode
        self._scheduler.use(limits.one_at_a_time() if mode == "single" else limits)
        self._wake.set()

    async def run(self) -> None:
        """Serves until `close`. Raises what a step raised: the engine is dead then, and says so."""
        self._is_running = True
        try:
            while (step := await self._next_step()) is not None:
                outcomes = await self._compute(step)
                if outcomes is None:
                    self._retreat(step)
                    continue
                choices = self._end_failed(outcomes)
                advances = self._apply(step, choices)
                self._emit(advances, choices)
        finally:
            self._end()
            self._stopped.set()

    async def generate(
        self, request: GenerationRequest, timings: RequestTimings
    ) -> AsyncGenerator[tuple[TokenOutput, ...], None]:
        """See Engine. Further errors: PromptTooLong, InvalidRequest, FeatureRevisionMismatch, OutOfMemory,
        Draining.
        """
        timings.submitted = time.monotonic()
        check_length(request, self._context_tokens)
        check_feature_ids(request)
        sequence = _sequence_of(request, timings.submitted)
        self._check_room(sequence)
        await asyncio.to_thread(self._prepare, request, sequence)
        if sequence.finish is not None:
            yield (TokenOutput(None, finish=sequence.finish),)
            return
        self._check_room(sequence)
        live = self._submit(sequence, request, timings)
        try:
            is_finished = False
            while not is_finished:
                outputs = await live.take()
                is_finished = outputs[-1].finish is not None
                yield outputs
        finally:
            self._leave(sequence.request_id)

    def stats(self) -> EngineStats:
        """How busy the engine is."""
        blocks = self._scheduler.blocks
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=blocks.used,
            kv_blocks_cached=blocks.cached,
            kv_blocks_total=blocks.total,
            preempted=self._scheduler.num_preempted,
            evicted=blocks.num_evicted,
        )

    async def close(self) -> None:
        """Ends every request that still runs with Draining, then the loop."""
        self._end()
        self._wake.set()
        if self._is_running:
            await self._stopped.wait()

    def _prepare(self, request: GenerationRequest, sequence: Sequence) -> None:
        """What takes long enough to keep it off the event loop."""
        self._runner.check(request)
        sequence.reusable_names()

    def _check_room(self, sequence: Sequence) -> None:
        if not self._is_open:
            raise Draining("this decoder shuts down")
        if not self._scheduler.can_add(sequence):
            raise QueueFull(
                f"{self._scheduler.num_waiting} requests wait already",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _submit(self, sequence: Sequence, request: GenerationRequest, timings: RequestTimings) -> LiveRequest:
        live = self._live[sequence.request_id] = LiveRequest(request, timings)
        self._scheduler.add(sequence)
        self._load_wanted()
        self._wake.set()
        return live

    def _leave(self, request_id: str) -> None:
        """The reader of a request has gone, before the last output or after it."""
        live = self._live.get(request_id)
        if live is not None:
            metrics.ABANDONED.inc()
            self._drop(live)
            self._observe()

    def _drop(self, live: LiveRequest) -> None:
        """Lets go of all that the engine has of a request, whether it is finished or not."""
        request_id = live.request.request_id
        del self._live[request_id]
        self._scheduler.remove(request_id)
        if live.is_open:
            self._to_close.append(request_id)
        if live.loading is not None:
            live.loading.cancel()
        live.let_go()

    def _fail(self, live: LiveRequest, error: BaseException) -> None:
        self._drop(live)
        live.fail(error)

    async def _next_step(self) -> Step | None:
        """Lets go of who has ended and waits until somebody can run; None when the engine closes."""
        while self._is_open:
            while self._to_close:
                self._runner.close(self._to_close.pop())
            self._wake.clear()
            step = self._scheduler.schedule(time.monotonic())
            self._load_wanted()
            self._observe()
            if step.chunks:
                return step
            await self._sleep()
        return None

    async def _sleep(self) -> None:
        """Until something comes or goes, or the admission window closes."""
        wake_at = self._scheduler.wake_at
        timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return

    def _load_wanted(self) -> None:
        for wanted in self._scheduler.take_wanted():
            live = self._live[wanted.request_id]
            live.loading = asyncio.create_task(self._load(live, wanted.first))
            self._loads.add(live.loading)
            live.loading.add_done_callback(self._loads.discard)

    async def _load(self, live: LiveRequest, first: int) -> None:
        """Fetches the features of a request; a failure is that request's alone."""
        try:
            bundles = await live.request.features.load(first)
            prompt = live.request.prompt
            await asyncio.to_thread(self._runner.check_features, prompt, first, bundles)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader gets it
            live.loading = None
            self._fail(live, error)
            return
        live.loaded, live.loading = Loaded(first, bundles), None
        self._scheduler.provide(live.request.request_id, first)
        self._wake.set()

    async def _compute(self, step: Step) -> Mapping[str, Outcome] | None:
        """Runs a step on the model thread; None when the device had too little memory for it."""
        now = time.monotonic()
        named = [self._live[chunk.request_id] for chunk in step.chunks]
        opened = [live.request for live in named if not live.is_open]
        loaded = [(live.request.request_id, live.loaded) for live in named if live.loaded is not None]
        for live, chunk in zip(named, step.chunks, strict=True):
            if not live.is_open:
                self._book_start(live, chunk.start, now)
            live.is_open, live.loaded = True, None
        loop = asyncio.get_running_loop()
        del live, named
        try:
            outcomes = await loop.run_in_executor(
                self._model_thread, self._provide_and_run, opened, loaded, step
            )
        except OutOfMemory:
            return None
        metrics.observe_step(step, time.monotonic() - now, self._mode)
        return outcomes

    def _book_start(self, live: LiveRequest, num_reused: int, now: float) -> None:
        timings = live.timings
        timings.first_scheduled = now
        timings.reused_tokens = min(num_reused, len(live.request.prompt.token_ids))
        metrics.QUEUE_TIME.labels(self._mode).observe(now - timings.submitted)
        metrics.REUSED_TOKENS.inc(timings.reused_tokens)

    def _provide_and_run(
        self, opened: List[GenerationRequest], loaded: List[tuple[str, Loaded]], step: Step
    ) -> Mapping[str, Outcome]:
        for request in opened:
            self._runner.open(request)
        for request_id, each in loaded:
            self._runner.provide(request_id, each.first, each.bundles)
        return self._runner.run(step)

    def _retreat(self, step: Step) -> None:
        """Goes on with less at a time; a request that is too much by itself ends."""
        metrics.OUT_OF_MEMORY.inc()
        hopeless = self._scheduler.retreat(step)
        if hopeless in self._live:
            self._fail(self._live[hopeless], OutOfMemory("the device has too little memory for this request"))

    def _end_failed(self, outcomes: Mapping[str, Outcome]) -> Mapping[str, Choice]:
        """Ends the requests whose step gave an error; returns the tokens of the others."""
        for request_id, outcome in outcomes.items():
            live = self._live.get(request_id)
            if isinstance(outcome, LenspairError) and live is not None:
                self._fail(live, outcome)
        return {request_id: each for request_id, each in outcomes.items() if isinstance(each, Choice)}

    def _observe(self) -> None:
        before, self._observed = self._observed, self.stats()
        metrics.observe_stats(self._observed, before)

    def _apply(self, step: Step, choices: Mapping[str, Choice]) -> list[Advance]:
        tokens = {request_id: choice.token_id for request_id, choice in choices.items()}
        return self._scheduler.advance(step, tokens)

    def _emit(self, advances: list[Advance], choices: Mapping[str, Choice]) -> None:
        now = time.monotonic()
        for advance in advances:
            live = self._live[advance.request_id]
            live.let_go()  # the prompt is in the cache
            _book_token(live, now, self._mode)
            live.put(_output_of(advance, choices[advance.request_id]))
            if advance.finish is not None:
                self._drop(live)

    def _end(self) -> None:
        """Takes no more requests, and ends those that are open."""
        self._is_open = False
        for live in list(self._live.values()):
            self._fail(live, Draining("this decoder shuts down"))
        self._model_thread.shutdown(wait=False)


def _sequence_of(request: GenerationRequest, now: float) -> Sequence:
    prompt, limits = request.prompt, request.limits
    return Sequence.begin(
        request.request_id,
        prompt.token_ids,
        max_output_tokens=limits.max_output_tokens,
        stop_token_ids=limits.stop_token_ids,
        continuation=request.continuation,
        priority=request.priority,
        arrived=now,
        visual_spans=prompt.visual_spans,
        feature_ids=request.feature_ids,
        prefix_root=request.prefix_root,
    )


def _book_token(live: LiveRequest, now: float, mode: Mode) -> None:
    if live.last_token is None:
        live.timings.first_token = now
        metrics.TIME_TO_FIRST_TOKEN.labels(mode).observe(now - live.timings.submitted)
    else:
        metrics.INTER_TOKEN_LATENCY.labels(mode).observe(now - live.last_token)
    live.last_token = now


def _output_of(advance: Advance, choice: Choice) -> TokenOutput:
    if advance.finish == "stop":
        return TokenOutput(None, finish="stop")
    return TokenOutput(choice.token_id, choice.logprob, choice.top, advance.finish)
