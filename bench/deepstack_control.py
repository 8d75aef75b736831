"""The control of a comparison: with one DeepStack level zeroed in the store, answers must differ."""

from collections.abc import Sequence
from pathlib import Path

from bench.comparing import compare_all
from bench.pair_client import PairClient
from bench.reference import ReferenceAnswer
from bench.requests import VerifyRequest
from bench.stored_levels import StoredLevels
from shared.checkpoint import open_checkpoint
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

# No feature may expire during a comparison.
TTL_SECONDS = 3600


async def zero_each_level(
    client: PairClient,
    store: FeatureStore,
    requests: Sequence[VerifyRequest],
    expected: Sequence[ReferenceAnswer],
) -> tuple[int, ...]:
    """For each DeepStack level: how many of the requests fail while the store holds zeros in it."""
    keys = {await client.encode(medium) for request in requests for medium in request.media}
    differing: list[int] = []
    stored = await StoredLevels.read(store, keys)
    for level in range(stored.count):
        async with stored.zeroed(level):
            answers = await client.answer_all(requests)
            comparisons = await compare_all(client, requests, answers, expected)
        differing.append(sum(bool(comparison.problem) for comparison in comparisons))
    return tuple(differing)


def open_pair_store(url: str, checkpoint: Path) -> FeatureStore:
    """The store of a running pair, for writing to it as its encoder does."""
    return open_feature_store(
        url=url,
        fingerprint=open_checkpoint(str(checkpoint)).fingerprint,
        ttl_seconds=TTL_SECONDS,
        timeout_seconds=10,
        connections=2,
        chunk_bytes=1024 * 1024,
    )
