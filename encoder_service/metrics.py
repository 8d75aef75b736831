"""What operators see of the encoder: counters, queue gauges, the time of each stage, and its span."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from opentelemetry import trace
from prometheus_client import Counter, Gauge, Histogram

Stage = Literal["digest", "lookup", "lease", "decode", "preprocess", "queue", "tower", "store"]

FEATURES = Counter(
    "lenspair_encoder_features_total", "Features handed out, by how they came about.", ["outcome"]
)
DROPPED = Counter(
    "lenspair_encoder_dropped_total",
    "Items dropped from the queue before they cost a pass, because nobody waited for them.",
    ["cause"],
)
BATCH_PATCHES = Histogram(
    "lenspair_encoder_batch_patches",
    "Patches of one tower pass.",
    buckets=[2**exponent for exponent in range(4, 17)],
)
BATCH_ITEMS = Histogram(
    "lenspair_encoder_batch_items", "Items of one tower pass.", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)
RETRIED_BATCHES = Counter(
    "lenspair_encoder_retried_batches_total", "Failed passes that were run item by item."
)
QUEUE_PATCHES = Gauge("lenspair_encoder_queue_patches", "Patches that wait for the tower or are prepared.")
QUEUE_ITEMS = Gauge("lenspair_encoder_queue_items", "Items that wait for the tower or are prepared.")
MEDIA_BYTES = Histogram(
    "lenspair_encoder_media_bytes",
    "Encoded bytes of one medium.",
    buckets=[4**exponent for exponent in range(5, 15)],
)
STAGE_SECONDS = Histogram(
    "lenspair_encoder_stage_seconds",
    "Time of one item in one stage.",
    ["stage"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)

HAND_OVERS = Counter(
    "lenspair_encoder_hand_overs_total",
    "Features that the store did not take, by what became of them: offered to a caller, not_wanted by any, "
    "too_large to keep, served to a decoder, or missing when one asked.",
    ["event"],
)
HAND_OVER_BYTES = Gauge("lenspair_encoder_hand_over_bytes", "Bytes kept to be handed over.")

HandOverEvent = Literal["offered", "not_wanted", "too_large", "served", "missing"]
for _event in get_args(HandOverEvent):
    HAND_OVERS.labels(_event)

LEASES = Counter(
    "lenspair_encoder_leases_total",
    "Computations that no other call of this process led: lease taken, or taken_over from another process, "
    "joined with one that stored the feature, without a lease because none could be had; and leases lost.",
    ["event"],
)
LEASE_WAIT_SECONDS = Histogram(
    "lenspair_encoder_lease_wait_seconds",
    "Waits for another process that computes the same feature.",
    buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)

LeaseEvent = Literal["taken", "taken_over", "joined", "without", "lost"]
for _event in get_args(LeaseEvent):
    LEASES.labels(_event)

tracer = trace.get_tracer("lenspair.encoder")

_SPAN_NAMES: dict[Stage, str] = {"store": "encode.store_put"}


def count_feature(outcome: str, num_tokens: int, *, is_offered: bool) -> None:
    """Counts a feature that is handed out, and says so on the span of the call."""
    FEATURES.labels(outcome).inc()
    if is_offered:
        HAND_OVERS.labels("offered").inc()
    span = trace.get_current_span()
    span.set_attribute("lenspair.feature.outcome", outcome)
    span.set_attribute("lenspair.feature.tokens", num_tokens)
    span.set_attribute("lenspair.feature.is_offered", is_offered)


@contextmanager
def stage(name: Stage) -> Iterator[trace.Span]:
    """Measures one stage of one request."""
    started = time.perf_counter()
    span_name = _SPAN_NAMES.get(name, f"encode.{name}")
    with tracer.start_as_current_span(span_name, record_exception=False) as span:
        try:
            yield span
        finally:
            STAGE_SECONDS.labels(name).observe(time.perf_counter() - started)
