"""The time of one request, shared by all its steps."""

import time
from collections.abc import Callable

from lenspair_client.errors import out_of_time


class Deadline:
    """Runs from its creation."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds = seconds

    def elapsed(self) -> float:
        """Seconds since the request began."""
        return self._clock() - self._start

    def remaining(self) -> float:
        """Seconds left; 0 or less when the time is used up."""
        return self._seconds - self.elapsed()

    def for_next_call(self) -> float:
        """Seconds left, above 0.

        Raises:
            DeadlineExceeded: none are left.
        """
        if self.remaining() <= 0:
            raise out_of_time()
        return self.remaining()
