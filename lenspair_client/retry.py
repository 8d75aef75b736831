"""Which failed calls are made again, and after how long; pure. What keeps asking is persistence.py."""

from lenspair_client.errors import FeatureNotFound, LenspairRpcError, QueueFull, StoreFull, Unavailable

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 2.0
# With less time left than this, another call would only hide why the others failed.
_LEAST_TIME = 0.1


def may_pass(error: LenspairRpcError) -> bool:
    """True for what passes without the caller's doing: a server or a store that is gone, or full."""
    return isinstance(error, Unavailable | QueueFull | StoreFull)


def wait_before_repeating(error: LenspairRpcError, failures: int, left: float, jitter: float) -> float | None:
    """Seconds until a failed call is made again; None when there is no time for it.

    `failures` counts those since the last success, this one included; `left` is the time for more of them;
    the jitter (0 to 1) spreads callers. A full queue is asked again when it said, not before. Waits grow,
    and get shorter again towards the end, so that no request ends with much of its time unused.
    """
    least = (error.retry_after or 0.0) * (1 + jitter / 4)
    if left < _LEAST_TIME or left <= least:
        return None
    if isinstance(error, FeatureNotFound) and failures == 1:  # nothing is wrong with the servers
        return 0.0
    return max(least, min(backoff(failures) * (1 + jitter) / 2, left / 2))


def backoff(failures: int) -> float:
    """The longest wait after so many failures in a row, in seconds."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(failures - 1, 10))
