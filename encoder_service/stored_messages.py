"""lenspair.encoder.v1 messages about stored features ↔ the values of that use case."""

from collections.abc import Sequence
from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from encoder_service.messages import feature_ref
from encoder_service.stored_features import StoreStats
from encoder_service.tally import Counts
from shared.errors import InvalidRequest
from shared.features.key import FeatureKey
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.store.store import StoredFeature

MAX_KEYS = 256


def feature_keys(texts: Sequence[str]) -> list[FeatureKey]:
    """The keys of a request, in their order."""
    if not 1 <= len(texts) <= MAX_KEYS:
        raise InvalidRequest(f"{len(texts)} keys; 1 to {MAX_KEYS} are allowed", field="keys")
    return [FeatureKey.parse(text, field=f"keys[{index}]") for index, text in enumerate(texts)]


def seconds_to_live(request: pb.KeepAliveRequest) -> float:
    """The time of a request, whatever it is."""
    if not request.HasField("time_to_live"):
        raise InvalidRequest("time_to_live is required", field="time_to_live")
    return _seconds(request.time_to_live)


def keep_alive_response(times: Sequence[datetime | None]) -> pb.KeepAliveResponse:
    results = [pb.KeepAliveResult(expire_time=_timestamp(time)) for time in times]
    return pb.KeepAliveResponse(results=results)


def evict_response(existed: Sequence[bool]) -> pb.EvictResponse:
    return pb.EvictResponse(results=[pb.EvictResult(existed=was_there) for was_there in existed])


def describe_response(features: Sequence[StoredFeature | None]) -> pb.DescribeFeaturesResponse:
    descriptions = [None if feature is None else _description(feature) for feature in features]
    return pb.DescribeFeaturesResponse(
        results=[pb.DescribeFeaturesResult(description=description) for description in descriptions]
    )


def stats_response(stats: StoreStats) -> pb.GetStoreStatsResponse:
    survey = stats.survey
    return pb.GetStoreStatsResponse(
        entry_count=survey.entries,
        size_bytes=survey.size_bytes,
        damaged_count=survey.damaged,
        oldest_create_time=_timestamp(survey.oldest),
        newest_create_time=_timestamp(survey.newest),
        first_expire_time=_timestamp(survey.first_expiry),
        last_expire_time=_timestamp(survey.last_expiry),
        requests=_counts(stats.counts),
        store_used_bytes=survey.memory.used_bytes if survey.memory else None,
        store_max_bytes=survey.memory.max_bytes if survey.memory else None,
    )


def _description(feature: StoredFeature) -> pb.FeatureDescription:
    manifest = feature.manifest
    return pb.FeatureDescription(
        feature=feature_ref(feature),
        create_time=_timestamp(manifest.created_at),
        dtype=manifest.dtype,
        hidden_size=manifest.hidden_size,
        deepstack_levels=manifest.deepstack_levels,
        chunk_count=len(manifest.chunk_checksums),
        fingerprint=manifest.fingerprint,
    )


def _counts(counts: Counts) -> pb.RequestCounts:
    return pb.RequestCounts(
        start_time=_timestamp(counts.since),
        hit_count=counts.hit,
        joined_count=counts.joined,
        encoded_count=counts.encoded,
        miss_count=counts.missed,
        hit_rate=counts.hit_rate,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _timestamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    message = Timestamp()
    message.FromDatetime(time)
    return message
