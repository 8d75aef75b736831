"""The store's metrics; knows no store."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import structlog
from prometheus_client import Counter, Gauge, Histogram

from shared.errors import StoreFull, StoreUnavailable
from shared.features.damage import DamageCause, DamagedRecord, UnusableRecord

_log = structlog.get_logger("lenspair.store")

# A cause that an operator can mend.
_IN_WORDS = {DamageCause.SEAL: "sealed with another LENSPAIR_STORE_KEY, or damaged"}

READ_BYTES = Counter("lenspair_store_read_bytes", "Feature bytes read from the store.")
WRITTEN_BYTES = Counter("lenspair_store_written_bytes", "Feature bytes written to the store.")
DAMAGED_RECORDS = Counter(
    "lenspair_store_damaged_records", "Records that were refused and deleted, by cause.", ["cause"]
)
INCOMPLETE_RECORDS = Counter(
    "lenspair_store_incomplete_records", "Records of which a part was gone, so that they were deleted."
)
CONNECTION_WAIT_SECONDS = Histogram(
    "lenspair_store_connection_wait_seconds",
    "Wait for a free connection to the store.",
    buckets=(0.0001, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10),
)
CACHE_HITS = Counter(
    "lenspair_store_cache_hits", "Fetches that moved no tensor: this process had it, or was reading it."
)
CACHE_MISSES = Counter("lenspair_store_cache_misses", "Fetches that the process cache passed to the store.")
CACHE_EVICTIONS = Counter(
    "lenspair_store_cache_evictions", "Bundles that left the process cache to make room for others."
)
CACHE_BYTES = Gauge("lenspair_store_cache_bytes", "Bytes of the tensors in the process cache.")
CACHE_ENTRIES = Gauge("lenspair_store_cache_entries", "Bundles in the process cache.")
_OPERATIONS = Counter(
    "lenspair_store_operations", "Store operations by kind and outcome.", ["operation", "outcome"]
)
_SECONDS = Histogram(
    "lenspair_store_operation_seconds",
    "Duration of store operations.",
    ["operation"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)

for _cause in DamageCause:
    DAMAGED_RECORDS.labels(_cause.value)


class Operation(StrEnum):
    """What was asked of a store."""

    LOOK_UP = "look_up"
    FETCH = "fetch"
    PUT = "put"
    DELETE = "delete"
    KEEP_ALIVE = "keep_alive"
    DESCRIBE = "describe"
    SURVEY = "survey"


class Outcome(StrEnum):
    """How it ended."""

    DONE = "done"
    HIT = "hit"
    MISS = "miss"
    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    FULL = "full"
    UNAVAILABLE = "unavailable"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Observation:
    """One operation under way; set `outcome` to what it came to."""

    def __init__(self) -> None:
        self.outcome = Outcome.DONE

    def hit_or_miss(self, found: object) -> None:
        self.outcome = Outcome.MISS if found is None else Outcome.HIT

    def refused(self, problem: UnusableRecord) -> None:
        if isinstance(problem, DamagedRecord):
            self.outcome = Outcome.DAMAGED
            cause = _IN_WORDS.get(problem.cause, problem.cause.value)
            _log.warning("a stored record was refused", cause=cause)
            DAMAGED_RECORDS.labels(problem.cause.value).inc()
        else:
            self.outcome = Outcome.INCOMPLETE
            INCOMPLETE_RECORDS.inc()


@contextmanager
def observed(operation: Operation) -> Iterator[Observation]:
    """Counts and times one operation, whatever way it ends."""
    observation = Observation()
    start = time.perf_counter()
    try:
        yield observation
    except BaseException as error:
        observation.outcome = _outcome(error)
        raise
    finally:
        _SECONDS.labels(operation.value).observe(time.perf_counter() - start)
        _OPERATIONS.labels(operation.value, observation.outcome.value).inc()


def _outcome(error: BaseException) -> Outcome:
    match error:
        case StoreFull():
            return Outcome.FULL
        case StoreUnavailable():
            return Outcome.UNAVAILABLE
        case asyncio.CancelledError():
            return Outcome.CANCELLED
        case _:
            return Outcome.FAILED
