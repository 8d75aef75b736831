"""DeepStack is never lost: a level of zeros fails the comparison, a record without a level is refused."""

from dataclasses import replace

import grpc
import pytest

from bench.comparing import compare
from bench.deepstack_control import open_pair_store, zero_each_level
from bench.pair_client import PairClient
from bench.reference import Reference
from bench.requests import verify_requests
from demo.pair import DEMO_CHECKPOINT, Pair
from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey

REQUESTS = [request for request in verify_requests(24, seed=3) if request.media]


async def test_each_level_shows_in_the_answers(pair: Pair) -> None:
    reference = Reference(DEMO_CHECKPOINT)
    expected = [reference.answer(request) for request in REQUESTS]
    store = open_pair_store(pair.store_url, DEMO_CHECKPOINT)
    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        answers = await client.answer_all(REQUESTS)
        for request, answer, right in zip(REQUESTS, answers, expected, strict=True):
            assert not (await compare(client, request, answer, right)).problem
        differing = await zero_each_level(client, store, REQUESTS, expected)
    await store.close()
    assert len(differing) >= 2
    assert all(differing)


async def test_a_record_without_a_level_is_refused(pair: Pair) -> None:
    request = REQUESTS[0]
    store = open_pair_store(pair.store_url, DEMO_CHECKPOINT)
    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        key = FeatureKey.parse(await client.encode(request.media[0]))
        stored = await store.look_up(key)
        assert stored is not None
        bundle = await store.fetch(stored.manifest)
        assert bundle is not None
        await store.put(key, _without_last_level(bundle))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.answer(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await store.put(key, bundle)
        assert (await client.answer(request)).text
    await store.close()


def _without_last_level(bundle: FeatureBundle) -> FeatureBundle:
    tensor = bundle.tensor[:, : -bundle.hidden_size].contiguous()
    return replace(bundle, tensor=tensor, deepstack_levels=bundle.deepstack_levels - 1)
