"""Isolated processes: whatever happens in one is that job's alone, and the next job finds a whole one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest

from shared.errors import MediaTooLarge
from shared.isolation.workers import IsolatedWorkers, WorkerLost

MB = 1 << 20


def open_workers(*, num_processes: int = 1, timeout_seconds: int = 30, setup: bytes = b"") -> IsolatedWorkers:
    return IsolatedWorkers(
        "tests.isolated_worker",
        setup,
        num_processes=num_processes,
        max_bytes=64 * MB,
        max_result_bytes=4 * MB,
        timeout_seconds=timeout_seconds,
    )


@pytest.fixture
async def workers() -> AsyncIterator[IsolatedWorkers]:
    made = open_workers(setup=b"set up: ")
    yield made
    made.close()


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def process_of(workers: IsolatedWorkers) -> int:
    return int(await workers.run(b"pid"))


async def test_a_job_gets_its_result_from_a_process_that_was_set_up(workers: IsolatedWorkers) -> None:
    assert await workers.run(b"echo one") == b"set up: one"
    assert await workers.run(b"echo two") == b"set up: two"
    assert await process_of(workers) == await process_of(workers) != os.getpid()


async def test_large_jobs_and_results_go_through(workers: IsolatedWorkers) -> None:
    text = b"x" * 3 * MB
    assert await workers.run(b"echo " + text) == b"set up: " + text


async def test_what_a_library_prints_does_not_disturb(workers: IsolatedWorkers) -> None:
    assert await workers.run(b"print") == b"printed"
    assert await workers.run(b"echo one") == b"set up: one"


async def test_a_refusal_is_the_error_with_its_field_and_metadata(workers: IsolatedWorkers) -> None:
    before = await process_of(workers)
    with pytest.raises(MediaTooLarge) as caught:
        await workers.run(b"refuse")
    assert (caught.value.message, caught.value.field) == ("too many frames", "media")
    assert caught.value.metadata == {"limit": "7"}
    assert await process_of(workers) == before


@pytest.mark.parametrize("job", [b"crash", b"raise", b"grow 200000000", b"answer 5000000"])
async def test_a_process_that_fails_is_replaced(workers: IsolatedWorkers, job: bytes) -> None:
    before = await process_of(workers)
    with pytest.raises(WorkerLost) as caught:
        await workers.run(job)
    assert "secret" not in str(caught.value)
    assert not is_running(before)
    assert await process_of(workers) != before


async def test_memory_within_the_limit_is_given(workers: IsolatedWorkers) -> None:
    before = await process_of(workers)
    for _ in range(3):
        assert await workers.run(b"grow 50000000") == b"50000000"
    assert await process_of(workers) == before


@pytest.mark.parametrize("job", [b"sleep 100", b"spin"])
async def test_a_process_that_is_too_slow_is_replaced(job: bytes) -> None:
    workers = open_workers(timeout_seconds=1)
    try:
        before = await process_of(workers)
        with pytest.raises(WorkerLost):
            await workers.run(job)
        assert not is_running(before)
        assert await process_of(workers) != before
    finally:
        workers.close()


async def abandon(workers: IsolatedWorkers, job: bytes) -> None:
    call = asyncio.create_task(workers.run(job))
    await asyncio.sleep(0.2)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


async def test_a_short_job_of_a_caller_who_has_gone_costs_no_process(workers: IsolatedWorkers) -> None:
    """What it answers must never be taken for the next job's result."""
    before = await process_of(workers)
    for number in range(3):
        await abandon(workers, b"sleep 0.3")
        assert await workers.run(b"echo %d" % number) == b"set up: %d" % number
    assert await process_of(workers) == before


@pytest.mark.parametrize("job", [b"sleep 100", b"spin"])
async def test_a_long_job_of_a_caller_who_has_gone_is_ended(workers: IsolatedWorkers, job: bytes) -> None:
    before = await process_of(workers)
    await abandon(workers, job)
    async with asyncio.timeout(10):
        assert await workers.run(b"echo next") == b"set up: next"
    assert await process_of(workers) != before


async def test_an_error_that_nobody_waits_for_disturbs_nobody(workers: IsolatedWorkers) -> None:
    for job in (b"refuse", b"crash"):
        call = asyncio.create_task(workers.run(job))
        await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    assert await workers.run(b"echo next") == b"set up: next"


async def test_an_interrupt_from_the_terminal_is_not_for_them(workers: IsolatedWorkers) -> None:
    assert os.getpgid(await process_of(workers)) != os.getpgid(0)


async def test_a_caller_who_goes_while_he_waits_costs_nothing(workers: IsolatedWorkers) -> None:
    before = await process_of(workers)
    first = asyncio.create_task(workers.run(b"sleep 0.5"))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(workers.run(b"crash"))
    await asyncio.sleep(0.1)
    second.cancel()
    assert await first == b"slept"
    assert await process_of(workers) == before


async def test_a_killed_process_is_found_dead_and_replaced(workers: IsolatedWorkers) -> None:
    await workers.run(b"pid")
    [process] = workers._all
    process.popen.send_signal(signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, process.popen.pid, os.WEXITED | os.WNOWAIT)
    assert await workers.run(b"echo one") == b"set up: one"


async def test_jobs_of_others_go_on_beside_a_crash() -> None:
    workers = open_workers(num_processes=2)
    try:
        beside = asyncio.create_task(workers.run(b"sleep 0.5"))
        await asyncio.sleep(0.1)
        with pytest.raises(WorkerLost):
            await workers.run(b"crash")
        assert await beside == b"slept"
        assert len(workers.process_ids) == 2
    finally:
        workers.close()


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    yield
    del os.environ[name]


async def test_no_secret_of_the_environment_reaches_a_process() -> None:
    with environment("LENSPAIR_STORE_KEYS", "secret"):
        workers = open_workers()
        try:
            assert b"LENSPAIR" not in await workers.run(b"environment")
        finally:
            workers.close()


async def test_closing_ends_processes_and_jobs(workers: IsolatedWorkers) -> None:
    process_ids = workers.process_ids
    running = asyncio.create_task(workers.run(b"sleep 100"))
    await asyncio.sleep(0.3)
    workers.close()
    with pytest.raises(WorkerLost):
        await running
    assert not any(map(is_running, process_ids))
    assert workers.process_ids == []


async def test_a_process_ends_when_its_parent_is_gone() -> None:
    workers = open_workers(timeout_seconds=1)
    try:
        process_id = await process_of(workers)
        [process] = workers._all
        assert process.popen.stdin is not None
        process.popen.stdin.close()
        assert await asyncio.to_thread(process.popen.wait, 10) == 0
        assert not is_running(process_id)
    finally:
        workers.close()
