"""kill -9 of each process while requests run: the others stay up, and what is restarted is used again."""

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator

import grpc
import pytest

from bench.pair_client import PairClient
from bench.requests import VerifyRequest, picture
from demo.pair import Pair
from demo.ports import free_port

DEADLINE_SECONDS = 15.0
CALLERS = 8
LOAD_SECONDS = 2.0
# What a caller may see of a process that is killed under it, or whose store is.
TYPED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair(environment={"LENSPAIR_STORE_TIMEOUT_SECONDS": "1"}, store_port=free_port()) as running:
        yield running


def _request(seed: int) -> VerifyRequest:
    return VerifyRequest("", (picture(random.Random(seed)),), "Describe the picture.", 40, 40)


async def _call(client: PairClient, seed: int) -> grpc.StatusCode:
    """One question about a new picture; OK or the status that it ended with, within its deadline."""
    started = time.monotonic()
    try:
        await client.answer(_request(seed), deadline_seconds=DEADLINE_SECONDS)
        code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        code = error.code()
    assert time.monotonic() - started < 2 * DEADLINE_SECONDS + 1
    return code


async def _calls_around(pair: Pair, kill_pid: int) -> list[grpc.StatusCode]:
    """How each call of a steady load ended, around the moment in which a process is killed."""
    codes: list[grpc.StatusCode] = []
    numbers = itertools.count()
    is_over = asyncio.Event()

    async def call_on_and_on(client: PairClient) -> None:
        while not is_over.is_set():
            codes.append(await _call(client, next(numbers)))

    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        callers = [asyncio.create_task(call_on_and_on(client)) for _ in range(CALLERS)]
        await asyncio.sleep(LOAD_SECONDS)
        assert set(codes) == {grpc.StatusCode.OK}, "the load did not run before the kill"
        os.kill(kill_pid, signal.SIGKILL)
        await asyncio.sleep(LOAD_SECONDS)
        is_over.set()
        await asyncio.gather(*callers)
    return codes


async def _works_again(pair: Pair) -> None:
    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        answer = await client.answer(_request(1_000_000), deadline_seconds=DEADLINE_SECONDS)
    assert answer.text


@pytest.mark.parametrize("victim", ["encoder", "decoder"])
async def test_a_killed_service_harms_no_other(pair: Pair, victim: str) -> None:
    killed, other = (pair.encoder, pair.decoder) if victim == "encoder" else (pair.decoder, pair.encoder)
    other_pid = other.pid
    codes = await _calls_around(pair, killed.pid)
    assert set(codes) <= TYPED | {grpc.StatusCode.OK}
    assert TYPED & set(codes), "no call was open when the service was killed"
    assert other.is_running()
    killed.restart()
    await _works_again(pair)
    assert other.pid == other_pid


async def test_a_killed_store_harms_no_service(pair: Pair) -> None:
    assert pair.store is not None
    pids = pair.encoder.pid, pair.decoder.pid
    codes = await _calls_around(pair, pair.store.pid)
    assert set(codes) <= TYPED | {grpc.StatusCode.OK}
    assert TYPED & set(codes), "no call needed the store when it was killed"
    pair.restart_store()
    await _works_again(pair)
    assert (pair.encoder.pid, pair.decoder.pid) == pids
    assert pair.encoder.is_running()
    assert pair.decoder.is_running()


async def test_text_needs_no_store(pair: Pair) -> None:
    assert pair.store is not None
    os.kill(pair.store.pid, signal.SIGKILL)
    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        answer = await client.answer(VerifyRequest("", (), "Say hello.", 20), deadline_seconds=10)
    assert answer.text
