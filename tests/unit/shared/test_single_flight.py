"""One computation for all who ask at the same time."""

import asyncio

import pytest

from shared.batching import Claim
from shared.errors import InvalidMedia
from shared.single_flight import SingleFlight

FAR = 1e9


class Work:
    """Counts its runs and ends when told to."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        self.num_cancelled = 0

    async def __call__(self, claim: Claim) -> int:
        self.claims.append(claim)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return len(self.claims)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start(
    flights: SingleFlight[str, int], work: Work, key: str = "k", deadline: float = FAR
) -> asyncio.Task[tuple[int, bool]]:
    task = asyncio.create_task(flights.run(key, deadline, work))
    await settle()
    return task


async def test_many_callers_one_run() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    tasks = [await start(flights, work) for _ in range(5)]
    work.go_on.set()
    assert [await task for task in tasks] == [(1, True)] + [(1, False)] * 4
    assert await flights.run("k", FAR, work) == (2, True)


async def test_keys_do_not_mix() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    tasks = [await start(flights, work, key) for key in "ab"]
    work.go_on.set()
    await asyncio.gather(*tasks)
    assert len(work.claims) == 2


async def test_a_cancelled_leader_does_not_fail_its_followers() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    leader = await start(flights, work)
    follower = await start(flights, work)
    leader.cancel()
    await settle()
    work.go_on.set()
    assert await follower == (1, False)
    assert work.num_cancelled == 0


async def test_when_all_have_gone_the_work_ends() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    tasks = [await start(flights, work) for _ in range(3)]
    for task in tasks:
        task.cancel()
    await settle()
    assert work.num_cancelled == 1
    assert work.claims[0].cancelled


async def test_who_comes_after_a_cancelled_flight_gets_a_new_one() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    first = await start(flights, work)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.create_task(flights.run("k", FAR, work))
    await settle()
    work.go_on.set()
    assert await second == (2, True)


async def test_an_error_reaches_everyone_and_is_not_kept() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    work.error = InvalidMedia("damaged")
    tasks = [await start(flights, work) for _ in range(3)]
    work.go_on.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, InvalidMedia) for outcome in outcomes)
    work.error = None
    assert await flights.run("k", FAR, work) == (2, True)


async def test_the_claim_lasts_as_long_as_the_most_patient() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    tasks = [await start(flights, work, deadline=deadline) for deadline in (1.0, 9.0, 5.0)]
    assert work.claims[0].deadline == 9.0
    work.go_on.set()
    await asyncio.gather(*tasks)


async def test_close_ends_what_runs() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    task = await start(flights, work)
    await flights.close()
    with pytest.raises(asyncio.CancelledError):
        await task
