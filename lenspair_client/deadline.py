"""The time of one request, shared by all its steps."""

import math
import time
from collections.abc import Callable

from lenspair_client.errors import out_of_time


class Deadline:
    """Runs from its creation. `repeated` counts the attempts of steps that were made again in it.

    `patience` is how many seconds a step may go on failing; by default as long as there is time.
    """

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        patience: float = math.inf,
    ) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds = seconds
        self._patience = patience
        self.repeated = 0

    def elapsed(self) -> float:
        """Seconds since the request began."""
        return self._clock() - self._start

    def remaining(self) -> float:
        """Seconds left; 0 or less when the time is used up."""
        return self._seconds - self.elapsed()

    def remaining_for_failures(self, failing: float) -> float:
        """Seconds left for a step that has failed for so many seconds."""
        return min(self.remaining(), self._patience - failing)

    def for_next_call(self) -> float:
        """Seconds left, above 0.

        Raises:
            DeadlineExceeded: none are left.
        """
        if self.remaining() <= 0:
            raise out_of_time()
        return self.remaining()
