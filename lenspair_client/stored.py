"""The flows of stored features: kept alive, evicted, described, counted."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from lenspair_client import stored_messages
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Method
from lenspair_client.persistence import call
from lenspair_client.values import Feature, FeatureDescription, StoreStats
from shared.pb.lenspair.encoder.v1 import encoder_pb2

# The contract's limit for one call.
_MOST_KEYS = 256


def keep_alive(
    features: Sequence[Feature | str], seconds: float, deadline: Deadline
) -> Flow[tuple[datetime | None, ...]]:
    """When the store forgets each feature now; None for those that it does not have."""
    time_to_live = stored_messages.duration(seconds)
    times: list[datetime | None] = []
    for keys in _batches(features):
        request = encoder_pb2.KeepAliveRequest(keys=keys, time_to_live=time_to_live)
        response = yield from call(Method.KEEP_ALIVE, request, deadline)
        times += stored_messages.times_of(response)
    return tuple(times)


def evict(features: Sequence[Feature | str], deadline: Deadline) -> Flow[tuple[bool, ...]]:
    """Whether each feature was there, when its eviction was asked for the last time."""
    existed: list[bool] = []
    for keys in _batches(features):
        request = encoder_pb2.EvictRequest(keys=keys)
        response = yield from call(Method.EVICT, request, deadline)
        existed += [result.existed for result in response.results]
    return tuple(existed)


def describe(
    features: Sequence[Feature | str], deadline: Deadline
) -> Flow[tuple[FeatureDescription | None, ...]]:
    """What is known of each feature; None for those that are not there."""
    descriptions: list[FeatureDescription | None] = []
    for keys in _batches(features):
        request = encoder_pb2.DescribeFeaturesRequest(keys=keys)
        response = yield from call(Method.DESCRIBE, request, deadline)
        descriptions += stored_messages.descriptions_of(response)
    return tuple(descriptions)


def store_stats(deadline: Deadline) -> Flow[StoreStats]:
    """The counts of the caller's tenant."""
    request = encoder_pb2.GetStoreStatsRequest()
    response = yield from call(Method.STORE_STATS, request, deadline)
    return stored_messages.stats_of(response)


def _batches(features: Sequence[Feature | str]) -> Iterator[list[str]]:
    keys = [feature if isinstance(feature, str) else feature.key for feature in features]
    for start in range(0, len(keys), _MOST_KEYS):
        yield keys[start : start + _MOST_KEYS]
