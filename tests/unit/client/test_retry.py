"""Which calls are made again, and when."""

import grpc
import pytest

from lenspair_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FeatureNotFound,
    Internal,
    InvalidArgument,
    LenspairRpcError,
    QueueFull,
    ResourceExhausted,
    StoreFull,
    Unavailable,
)
from lenspair_client.retry import backoff, may_pass, wait_before_repeating

GONE = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE)
FULL = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=2.0)
FULL_WITHOUT_HINT = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
STORE_FULL = StoreFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
MISSING = FeatureNotFound("missing", code=grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("error", [GONE, FULL, FULL_WITHOUT_HINT, STORE_FULL])
def test_what_is_gone_or_full_may_pass(error: LenspairRpcError) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("no", code=grpc.StatusCode.INVALID_ARGUMENT),
        DeadlineExceeded("late", code=grpc.StatusCode.DEADLINE_EXCEEDED),
        FailedPrecondition("no", code=grpc.StatusCode.FAILED_PRECONDITION),
        Internal("oh", code=grpc.StatusCode.INTERNAL),
        ResourceExhausted("message too large", code=grpc.StatusCode.RESOURCE_EXHAUSTED),
        MISSING,
    ],
)
def test_what_cannot_pass_is_not_repeated(error: LenspairRpcError) -> None:
    assert not may_pass(error)


def test_a_full_queue_is_asked_again_when_it_said_and_callers_spread() -> None:
    assert wait_before_repeating(FULL, 1, 60, 0.0) == 2.0
    assert wait_before_repeating(FULL, 9, 60, 1.0) == 2.5
    assert wait_before_repeating(FULL, 1, 1.9, 0.0) is None


def test_a_queue_that_stays_full_is_asked_ever_more_seldom() -> None:
    """Each attempt may send a whole picture; the hint is about the moment, not about others who wait."""
    full = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=0.1)
    assert wait_before_repeating(full, 1, 60, 0.0) == 0.1
    assert wait_before_repeating(full, 9, 60, 1.0) == backoff(9)
    assert wait_before_repeating(full, 9, 0.3, 1.0) == 0.15


def test_waits_grow_to_a_limit_and_callers_spread() -> None:
    longest = [wait_before_repeating(GONE, failures, 60, 1.0) for failures in range(1, 9)]
    assert longest == [backoff(failures) for failures in range(1, 9)] == sorted(longest, key=float)  # type: ignore[arg-type]
    assert (longest[0], longest[-1]) == (0.1, 2.0)
    assert wait_before_repeating(FULL_WITHOUT_HINT, 3, 60, 0.0) == backoff(3) / 2
    assert backoff(10_000) == 2.0


def test_waits_get_shorter_again_before_the_end() -> None:
    assert wait_before_repeating(GONE, 9, 1.0, 1.0) == 0.5
    assert wait_before_repeating(GONE, 9, 0.05, 0.0) is None
    assert wait_before_repeating(GONE, 1, -1.0, 0.0) is None


def test_a_feature_that_is_gone_is_encoded_again_at_once_but_not_again_and_again() -> None:
    assert wait_before_repeating(MISSING, 1, 60, 1.0) == 0.0
    assert wait_before_repeating(MISSING, 2, 60, 1.0) == backoff(2)
