"""The loop between requests and the tower: take a batch, run it on the model thread, resolve the waiters."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from opentelemetry import trace

from encoder_service import metrics
from encoder_service.tower import Patches, VisionTower
from shared.batching import Batcher, BatchLimits, Claim, Entry
from shared.errors import DeadlineExceeded, LenspairError, QueueFull
from shared.features.bundle import FeatureBundle

_log = structlog.get_logger("lenspair.encoder")

_FIRST_GUESS_PATCHES_PER_SECOND = 2000.0
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One item on its way through the tower, and those who wait for it."""

    patches: Patches
    started: asyncio.Future[None]
    done: asyncio.Future[FeatureBundle]
    link: trace.Link

    def fail(self, error: BaseException) -> None:
        for future in (self.started, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen, also when everybody has gone


class Worker:
    """Owns the queue and the model thread. `run` must run for as long as anything is encoded."""

    def __init__(
        self,
        tower: VisionTower,
        limits: BatchLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tower = tower
        self._batcher: Batcher[_Job] = Batcher(limits)
        self.max_batch_patches = limits.max_batch_cost
        self._clock = clock
        self._arrived = asyncio.Event()
        self._model_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tower")
        self._patches_per_second = _FIRST_GUESS_PATCHES_PER_SECOND

    @contextmanager
    def place(self, cost: int) -> Iterator[None]:
        """Holds a place in the queue while an item of so many patches is prepared.

        Raises:
            QueueFull: there is none.
        """
        self._drop_dead()
        if not self._batcher.can_reserve(cost):
            raise QueueFull("too many pictures wait already", retry_after_seconds=self._retry_after(cost))
        self._batcher.reserve(cost)
        self._show_queue()
        try:
            yield
        finally:
            self._batcher.release(cost)
            self._show_queue()

    def submit(self, patches: Patches, claim: Claim) -> _Job:
        """Queues an item; give its place back directly before."""
        loop = asyncio.get_running_loop()
        link = trace.Link(trace.get_current_span().get_span_context())
        job = _Job(patches, loop.create_future(), loop.create_future(), link)
        self._batcher.add(Entry(job, patches.count, self._clock(), claim))
        self._show_queue()
        self._arrived.set()
        return job

    async def encode(self, job: _Job) -> FeatureBundle:
        """The features of a submitted item.

        Raises:
            DeadlineExceeded: it was still in the queue when nobody waited for it any more.
        """
        with metrics.stage("queue"):
            await job.started
        with metrics.stage("tower"):
            return await job.done

    async def run(self) -> None:
        """Serves the queue until it is cancelled."""
        while True:
            await self._wait_until_due()
            await self._run_batch(self._batcher.take())

    def close(self) -> None:
        """Ends the model thread, after the pass that it may be in."""
        self._model_thread.shutdown(wait=True, cancel_futures=True)

    async def _wait_until_due(self) -> None:
        while True:
            self._drop_dead()
            now = self._clock()
            if self._batcher.is_due(now):
                return
            wake_at = self._batcher.wake_at()
            self._arrived.clear()
            try:
                async with asyncio.timeout(None if wake_at is None else max(0.0, wake_at - now)):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    async def _run_batch(self, entries: Sequence[Entry[_Job]]) -> None:
        self._show_queue()
        jobs = [entry.item for entry in entries]
        for job in jobs:
            if not job.started.done():
                job.started.set_result(None)
        try:
            await self._run_jobs(jobs)
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the items of this pass
            if len(jobs) == 1:
                jobs[0].fail(error)
                return
            _log.warning("a pass failed; its items are run one by one", items=len(jobs), exc_info=error)
            metrics.RETRIED_BATCHES.inc()
            for entry in entries:
                await self._run_batch([entry])

    async def _run_jobs(self, jobs: Sequence[_Job]) -> None:
        """One pass.

        Raises:
            Exception: whatever the tower raises; then no job is resolved.
        """
        batch = [job.patches for job in jobs]
        num_patches = sum(patches.count for patches in batch)
        attributes = {"lenspair.batch.size": len(jobs), "lenspair.batch.patches": num_patches}
        started = self._clock()
        with metrics.tracer.start_as_current_span(
            "encode.batch", links=[job.link for job in jobs], attributes=attributes
        ):
            loop = asyncio.get_running_loop()
            bundles = await loop.run_in_executor(self._model_thread, self._compute, batch)
        self._learn_speed(num_patches, self._clock() - started)
        metrics.BATCH_ITEMS.observe(len(jobs))
        metrics.BATCH_PATCHES.observe(num_patches)
        for job, bundle in zip(jobs, bundles, strict=True):
            _resolve(job, bundle)

    def _compute(self, batch: Sequence[Patches]) -> list[FeatureBundle | None]:
        """On the model thread. None stands for features that are not finite."""
        return [bundle if bundle.is_finite() else None for bundle in self._tower.encode(batch)]

    def _drop_dead(self) -> None:
        dropped = self._batcher.prune(self._clock())
        for cause, entries in (("expired", dropped.expired), ("cancelled", dropped.cancelled)):
            for entry in entries:
                metrics.DROPPED.labels(cause).inc()
                entry.item.fail(DeadlineExceeded("the deadline passed while the picture waited"))
        self._show_queue()

    def _learn_speed(self, num_patches: int, seconds: float) -> None:
        self._patches_per_second += 0.2 * (num_patches / max(seconds, 1e-6) - self._patches_per_second)

    def _retry_after(self, cost: int) -> float:
        seconds = (self._batcher.cost + cost) / self._patches_per_second
        return min(max(seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)

    def _show_queue(self) -> None:
        metrics.QUEUE_ITEMS.set(self._batcher.num_items)
        metrics.QUEUE_PATCHES.set(self._batcher.cost)


def _resolve(job: _Job, bundle: FeatureBundle | None) -> None:
    if bundle is None:
        job.fail(LenspairError("the vision tower gave values that are not finite"))
    elif not job.done.done():
        job.done.set_result(bundle)
