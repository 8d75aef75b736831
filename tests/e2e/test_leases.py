"""Two encoders as processes on one store: one computes a new picture, and one that is killed is followed."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator

import grpc.aio
import pytest
import redis

from bench.requests import picture
from demo.pair import Pair, ServiceProcess
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc

LEASE_SECONDS = 2.0
# How long a picture waits for company: the time in which a leader can be caught in the middle.
WINDOW_SECONDS = 1.5
DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    environment = {
        "LENSPAIR_LEASE_SECONDS": str(LEASE_SECONDS),
        "LENSPAIR_BATCH_WINDOW_MS": str(WINDOW_SECONDS * 1000),
    }
    with Pair(environment=environment, num_encoders=2, num_decoders=0) as running:
        yield running


async def encode(encoder: ServiceProcess, image: bytes) -> encoder_pb2.EncodeResponse:
    media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_IMAGE, data=image)
    async with grpc.aio.insecure_channel(encoder.address) as channel:
        response = await encoder_pb2_grpc.EncoderServiceStub(channel).Encode(
            encoder_pb2.EncodeRequest(media=media), timeout=DEADLINE_SECONDS
        )
        assert isinstance(response, encoder_pb2.EncodeResponse)
        return response


async def a_lease_is_held(pair: Pair) -> None:
    with redis.Redis.from_url(pair.store_url, protocol=2) as store:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not any(True for _ in store.scan_iter("lenspair:*:l")):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


# C23
async def test_sixteen_calls_over_two_processes_compute_once(pair: Pair) -> None:
    image = picture(random.Random(1))
    calls = (encode(pair.encoders[number % 2], image) for number in range(16))
    answers = await asyncio.gather(*calls)
    assert len({answer.feature.key for answer in answers}) == 1
    outcomes = sorted(answer.outcome for answer in answers)
    assert outcomes == [encoder_pb2.OUTCOME_ENCODED] + [encoder_pb2.OUTCOME_JOINED] * 15


async def test_a_killed_leader_is_followed_within_its_lease(pair: Pair) -> None:
    image = picture(random.Random(2))
    leader, follower = pair.encoders
    leading = asyncio.create_task(encode(leader, image))
    await a_lease_is_held(pair)
    following = [asyncio.create_task(encode(follower, image)) for _ in range(4)]
    await asyncio.sleep(0.3)
    os.kill(leader.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError):
        await leading
    answers = await asyncio.gather(*following)
    # It takes over when the lease ends, and then computes; the rest is room for a slow machine.
    assert time.monotonic() - killed_at < LEASE_SECONDS + WINDOW_SECONDS + 5
    assert min(answer.outcome for answer in answers) == encoder_pb2.OUTCOME_ENCODED
    leader.restart()
    assert (await encode(leader, image)).outcome == encoder_pb2.OUTCOME_HIT
