"""Which failed calls are made again, and after how long; pure.

gRPC itself repeats Encode and LookupFeatures while no server is there (lenspair_client/options.py). What it
can't decide is decided here, always a bounded number of times and within the request's time.
"""

from lenspair_client.errors import LenspairRpcError, QueueFull, Unavailable

ENCODE_ATTEMPTS = 6
UPLOAD_ATTEMPTS = 4
GENERATE_ATTEMPTS = 2
# An answer may move to another decoder as often as it likes, as long as it gets on in between.
STREAM_ATTEMPTS_WITHOUT_PROGRESS = 4
STREAM_ATTEMPTS = 16

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 2.0


def wait_before_encode(
    error: LenspairRpcError, attempt: int, remaining: float, jitter: float, *, is_upload: bool
) -> float | None:
    """Seconds until attempt number `attempt` + 1; None when there is none.

    A full queue is asked again when it said, the jitter (0 to 1) spreading callers over a quarter of that
    time. A broken upload is repeated here, because gRPC repeats single messages only.
    """
    match error:
        case QueueFull() if attempt < ENCODE_ATTEMPTS:
            return _in_time((error.retry_after or backoff(attempt)) * (1 + jitter / 4), remaining)
        case Unavailable() if is_upload and attempt < UPLOAD_ATTEMPTS:
            return _in_time(backoff(attempt), remaining)
        case _:
            return None


def wait_before_generate(error: LenspairRpcError, attempt: int, remaining: float) -> float | None:
    """Seconds until a whole answer is asked for again; once, when its decoder went away."""
    if isinstance(error, Unavailable) and attempt < GENERATE_ATTEMPTS:
        return _in_time(backoff(attempt), remaining)
    return None


def wait_before_resuming(
    error: LenspairRpcError, attempt: int, without_progress: int, remaining: float, *, has_begun: bool
) -> float | None:
    """Seconds until an answer goes on at another decoder, which may be busy; None when it is lost.

    `attempt` counts all failures of the answer, `without_progress` those since its last token.
    """
    if attempt >= STREAM_ATTEMPTS or without_progress >= STREAM_ATTEMPTS_WITHOUT_PROGRESS:
        return None
    match error:
        case Unavailable():
            return _in_time(backoff(without_progress), remaining)
        case QueueFull() if has_begun:
            return _in_time(error.retry_after or backoff(without_progress), remaining)
        case _:
            return None


def backoff(attempt: int) -> float:
    """Seconds after failure number `attempt`, from 1 on."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (attempt - 1))


def _in_time(wait: float, remaining: float) -> float | None:
    return wait if wait < remaining else None
