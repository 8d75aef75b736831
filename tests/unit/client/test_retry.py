"""Which calls are made again, and when."""

import grpc
import pytest

from lenspair_client.errors import DeadlineExceeded, InvalidArgument, LenspairRpcError, QueueFull, Unavailable
from lenspair_client.retry import (
    ENCODE_ATTEMPTS,
    STREAM_ATTEMPTS,
    STREAM_ATTEMPTS_WITHOUT_PROGRESS,
    UPLOAD_ATTEMPTS,
    backoff,
    wait_before_encode,
    wait_before_generate,
    wait_before_resuming,
)

GONE = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE)
FULL = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=2.0)
FULL_WITHOUT_HINT = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
REFUSED = InvalidArgument("no", code=grpc.StatusCode.INVALID_ARGUMENT)
LATE = DeadlineExceeded("late", code=grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_full_queue_is_asked_again_when_it_said_and_callers_spread() -> None:
    assert wait_before_encode(FULL, 1, 60, 0.0, is_upload=False) == 2.0
    assert wait_before_encode(FULL, 1, 60, 1.0, is_upload=False) == 2.5
    assert wait_before_encode(FULL_WITHOUT_HINT, 3, 60, 0.0, is_upload=False) == backoff(3)


def test_a_full_queue_is_asked_a_bounded_number_of_times_and_in_time() -> None:
    assert wait_before_encode(FULL, ENCODE_ATTEMPTS, 60, 0.0, is_upload=False) is None
    assert wait_before_encode(FULL, 1, 1.9, 0.0, is_upload=False) is None
    assert wait_before_encode(FULL, 1, -1.0, 0.0, is_upload=False) is None


def test_a_missing_server_is_grpcs_business_unless_chunks_were_sent() -> None:
    assert wait_before_encode(GONE, 1, 60, 0.0, is_upload=False) is None
    assert wait_before_encode(GONE, 1, 60, 0.0, is_upload=True) == backoff(1)
    assert wait_before_encode(GONE, UPLOAD_ATTEMPTS, 60, 0.0, is_upload=True) is None


@pytest.mark.parametrize("error", [REFUSED, LATE])
def test_what_cannot_help_is_not_done(error: LenspairRpcError) -> None:
    assert wait_before_encode(error, 1, 60, 0.0, is_upload=True) is None
    assert wait_before_generate(error, 1, 60) is None
    assert wait_before_resuming(error, 1, 1, 60, has_begun=True) is None


def test_a_whole_answer_is_asked_for_twice_at_the_most() -> None:
    assert wait_before_generate(GONE, 1, 60) == backoff(1)
    assert wait_before_generate(GONE, 2, 60) is None
    assert wait_before_generate(FULL, 1, 60) is None


def test_an_answer_moves_on_as_long_as_it_gets_on() -> None:
    last = STREAM_ATTEMPTS - 1
    assert wait_before_resuming(GONE, last, 1, 60, has_begun=True) == backoff(1)
    assert wait_before_resuming(GONE, STREAM_ATTEMPTS, 1, 60, has_begun=True) is None
    stuck = STREAM_ATTEMPTS_WITHOUT_PROGRESS
    assert wait_before_resuming(GONE, stuck, stuck, 60, has_begun=True) is None


def test_a_busy_decoder_is_asked_again_only_for_an_answer_that_has_begun() -> None:
    assert wait_before_resuming(FULL, 1, 1, 60, has_begun=True) == 2.0
    assert wait_before_resuming(FULL, 1, 1, 60, has_begun=False) is None


def test_waits_grow_to_a_limit() -> None:
    waits = [backoff(attempt) for attempt in range(1, 9)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.1, 2.0)
