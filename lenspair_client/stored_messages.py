"""Responses about stored features read: messages of the contract → values; pure."""

import math
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lenspair_client.messages import feature_at
from lenspair_client.values import FeatureDescription, Outcome, RequestCounts, StoreStats
from shared.pb.lenspair.encoder.v1 import encoder_pb2

# About ten thousand years, which is all that a Duration holds.
_MOST_SECONDS = 315_576_000_000


def duration(seconds: float) -> Duration:
    """A time to live; whether it is one is the encoder's business.

    Raises:
        ValueError: no message can hold it.
    """
    if not (math.isfinite(seconds) and abs(seconds) <= _MOST_SECONDS):
        raise ValueError(f"a time to live must be a finite number of seconds, not {seconds}")
    whole = math.trunc(seconds)
    return Duration(seconds=whole, nanos=math.trunc((seconds - whole) * 1e9))


def times_of(response: encoder_pb2.KeepAliveResponse) -> list[datetime | None]:
    """When each feature is forgotten; None for those that are not there."""
    return [_time(result, "expire_time") for result in response.results]


def descriptions_of(response: encoder_pb2.DescribeFeaturesResponse) -> list[FeatureDescription | None]:
    """What is known of each feature; None for those that are not there."""
    return [
        _description(result.description) if result.HasField("description") else None
        for result in response.results
    ]


def stats_of(response: encoder_pb2.GetStoreStatsResponse) -> StoreStats:
    """The counts of a tenant."""
    return StoreStats(
        entries=response.entry_count,
        size_bytes=response.size_bytes,
        damaged=response.damaged_count,
        oldest=_time(response, "oldest_create_time"),
        newest=_time(response, "newest_create_time"),
        first_expiry=_time(response, "first_expire_time"),
        last_expiry=_time(response, "last_expire_time"),
        requests=_counts(response.requests),
        store_used_bytes=response.store_used_bytes if response.HasField("store_used_bytes") else None,
        store_max_bytes=response.store_max_bytes if response.HasField("store_max_bytes") else None,
    )


def _description(message: encoder_pb2.FeatureDescription) -> FeatureDescription:
    return FeatureDescription(
        feature=feature_at(message.feature, Outcome.HIT),
        created_at=_time(message, "create_time"),
        dtype=message.dtype,
        hidden_size=message.hidden_size,
        deepstack_levels=message.deepstack_levels,
        num_chunks=message.chunk_count,
        fingerprint=message.fingerprint,
    )


def _counts(message: encoder_pb2.RequestCounts) -> RequestCounts:
    return RequestCounts(
        since=_time(message, "start_time"),
        hits=message.hit_count,
        joined=message.joined_count,
        encoded=message.encoded_count,
        misses=message.miss_count,
        hit_rate=message.hit_rate if message.HasField("hit_rate") else None,
    )


def _time(message: Message, field: str) -> datetime | None:
    time: Timestamp = getattr(message, field)
    return time.ToDatetime(tzinfo=UTC) if message.HasField(field) else None
