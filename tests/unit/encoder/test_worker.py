"""The worker's loop with a tower that tests steer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
import torch
from prometheus_client import REGISTRY

from encoder_service.tower import Patches
from encoder_service.worker import Worker
from shared.batching import BatchLimits, Claim
from shared.errors import DeadlineExceeded, LenspairError, QueueFull
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from tests.fakes import FakeTower

FAR = 1e18


def limits(**changes: float) -> BatchLimits:
    values = {
        "max_batch_items": 8,
        "max_batch_cost": 1000,
        "max_queue_items": 100,
        "max_queue_cost": 10_000,
        "window_seconds": 0.01,
    }
    return BatchLimits(**(values | changes))  # type: ignore[arg-type]


def patches(value: float = 0.5, rows: int = 4) -> Patches:
    return Patches(torch.full((rows * 4, 12), value), Grid(1, 2, rows * 2))


@asynccontextmanager
async def running(tower: FakeTower, bounds: BatchLimits | None = None) -> AsyncIterator[Worker]:
    worker = Worker(tower, bounds or limits())
    loop = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        tower.gate.set()
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        worker.close()


async def encode(worker: Worker, item: Patches, claim: Claim | None = None) -> FeatureBundle:
    return await worker.encode(worker.submit(item, claim or Claim(FAR)))


def dropped(cause: str) -> float:
    return REGISTRY.get_sample_value("lenspair_encoder_dropped_total", {"cause": cause}) or 0.0


def queued() -> float | None:
    return REGISTRY.get_sample_value("lenspair_encoder_queue_items")


async def held(tower: FakeTower, worker: Worker) -> asyncio.Task[FeatureBundle]:
    """Occupies the model thread until the gate opens."""
    tower.gate.clear()
    task = asyncio.create_task(encode(worker, patches()))
    await asyncio.to_thread(tower.entered.wait, 10)
    return task


async def test_items_that_come_together_share_a_pass() -> None:
    tower = FakeTower()
    async with running(tower) as worker:
        values = [0.0, 0.25, 0.5]
        bundles = await asyncio.gather(*(encode(worker, patches(value)) for value in values))
    assert tower.passes == [3]
    assert [bundle.tensor[0, 0].item() for bundle in bundles] == [1.0, 1.25, 1.5]


# I48
async def test_work_is_split_by_the_patch_budget_and_equals_the_unsplit() -> None:
    items = [patches(index / 50, rows=1 + index % 5) for index in range(50)]
    results = []
    for budget in (10**9, 48):
        tower = FakeTower()
        bounds = limits(max_batch_cost=budget, max_batch_items=1000)
        async with running(tower, bounds) as worker:
            results.append(await asyncio.gather(*(encode(worker, item) for item in items)))
        assert (len(tower.passes) == 1) == (budget > 48)
    for whole, split in zip(*results, strict=True):
        assert torch.equal(whole.tensor, split.tensor)


async def test_an_item_larger_than_the_budget_is_served() -> None:
    async with running(FakeTower(), limits(max_batch_cost=4)) as worker:
        assert (await encode(worker, patches(rows=100))).token_count == 100


# B01
async def test_a_bad_item_fails_alone() -> None:
    tower = FakeTower()

    def spoil(batch: Sequence[Patches], features: torch.Tensor) -> None:
        if any(one.pixel_values[0, 0] == 13.0 for one in batch):
            raise ValueError("a bad item")

    tower.spoil = spoil
    async with running(tower) as worker:
        outcomes = await asyncio.gather(
            *(encode(worker, patches(value)) for value in (0.0, 13.0, 0.5, 13.0)), return_exceptions=True
        )
    assert [type(outcome) for outcome in outcomes] == [FeatureBundle, ValueError, FeatureBundle, ValueError]
    assert tower.passes == [4, 1, 1, 1, 1]


async def test_features_that_are_not_finite_fail_alone() -> None:
    tower = FakeTower()

    def spoil(_: Sequence[Patches], features: torch.Tensor) -> None:
        if features[0, 0] > 10:
            features[-1, -1] = float("nan")

    tower.spoil = spoil
    async with running(tower) as worker:
        outcomes = await asyncio.gather(
            *(encode(worker, patches(value)) for value in (0.0, 13.0)), return_exceptions=True
        )
    assert isinstance(outcomes[0], FeatureBundle)
    assert isinstance(outcomes[1], LenspairError)


# B07
async def test_cancelled_items_never_reach_the_tower() -> None:
    tower = FakeTower()
    before = dropped("cancelled")
    async with running(tower) as worker:
        first = await held(tower, worker)
        claims = [Claim(FAR) for _ in range(10)]
        tasks = [asyncio.create_task(encode(worker, patches(), claim)) for claim in claims]
        await asyncio.sleep(0)
        for claim, task in list(zip(claims, tasks, strict=True))[:9]:
            claim.cancelled = True
            task.cancel()
        tower.gate.set()
        await asyncio.gather(first, tasks[9])
    assert tower.passes == [1, 1]
    assert dropped("cancelled") - before == 9


# B06, B07
async def test_expired_items_never_reach_the_tower() -> None:
    tower = FakeTower()
    before = dropped("expired")
    async with running(tower) as worker:
        first = await held(tower, worker)
        late = asyncio.create_task(encode(worker, patches(), Claim(deadline=0.0)))
        await asyncio.sleep(0)
        tower.gate.set()
        await first
        with pytest.raises(DeadlineExceeded):
            await late
    assert tower.passes == [1]
    assert dropped("expired") - before == 1


# B03
async def test_after_a_storm_of_cancellations_everybody_is_served() -> None:
    tower = FakeTower()
    async with running(tower, limits(window_seconds=0.001)) as worker:
        for index in range(100):
            claim = Claim(FAR)
            task = asyncio.create_task(encode(worker, patches(), claim))
            await asyncio.sleep(0.0002 * (index % 5))
            if index % 2:
                claim.cancelled = True
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        async with asyncio.timeout(10):
            assert len(await asyncio.gather(*(encode(worker, patches()) for _ in range(20)))) == 20


# B09
async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    tower = FakeTower()
    async with running(tower, limits(max_queue_items=8)) as worker:
        first = await held(tower, worker)
        served: list[asyncio.Task[FeatureBundle]] = []
        refused: list[QueueFull] = []
        for _ in range(30):
            try:
                with worker.place(16):
                    pass
                served.append(asyncio.create_task(encode(worker, patches())))
                await asyncio.sleep(0)
            except QueueFull as error:
                refused.append(error)
            assert (queued() or 0) <= 8
        assert (len(served), len(refused)) == (8, 22)
        assert all(0.1 <= error.retry_after_seconds <= 30 for error in refused)
        tower.gate.set()
        await asyncio.gather(first, *served)
    assert queued() == 0


async def test_places_of_items_in_preparation_count() -> None:
    async with running(FakeTower(), limits(max_queue_cost=100)) as worker:
        with worker.place(60):
            with pytest.raises(QueueFull), worker.place(60):
                pass
            assert queued() == 1
        with worker.place(60):
            pass
    assert queued() == 0
