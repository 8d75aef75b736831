"""Steps that fail are made again until they succeed, or until time or patience is used up."""

import math
from collections.abc import Iterator

import grpc
import pytest

from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Sleep
from lenspair_client.errors import DeadlineExceeded, InvalidArgument, LenspairRpcError, Unavailable
from lenspair_client.persistence import Failures, persist

GONE = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE)
REFUSED = InvalidArgument("no", code=grpc.StatusCode.INVALID_ARGUMENT)


class Step:
    """One that takes `seconds`, and fails `failures` times; like a call it ends with the request's time."""

    def __init__(
        self,
        seconds: float,
        *,
        timeout: float = 60.0,
        patience: float = math.inf,
        failures: float = math.inf,
        error: LenspairRpcError = GONE,
    ) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.attempts = 0
        self.deadline = Deadline(timeout, lambda: self.now, patience=patience)
        self._failures = failures
        self._error = error

    def attempt(self) -> Flow[str]:
        self.attempts += 1
        in_time = min(self.seconds, self.deadline.for_next_call())
        self.now += in_time
        yield from ()
        if in_time < self.seconds:
            raise DeadlineExceeded("late", code=grpc.StatusCode.DEADLINE_EXCEEDED)
        if self.attempts <= self._failures:
            raise self._error
        return "done"

    def run(self, failures: Failures | None = None) -> str:
        flow = persist(self.attempt, self.deadline, failures)
        try:
            while True:
                effect = next(flow)
                assert isinstance(effect, Sleep)
                self.now += effect.seconds
        except StopIteration as end:
            return str(end.value)


def test_a_step_is_made_again_until_it_succeeds() -> None:
    step = Step(0.1, failures=20)
    assert step.run() == "done"
    assert (step.attempts, step.deadline.repeated) == (21, 20)


def test_what_cannot_pass_is_told_at_once() -> None:
    step = Step(0.1, error=REFUSED)
    with pytest.raises(InvalidArgument):
        step.run()
    assert (step.attempts, step.now) == (1, 100.1)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 3.0])
def test_a_step_that_goes_on_failing_uses_all_its_time_and_says_why(seconds: float) -> None:
    step = Step(seconds, timeout=20)
    with pytest.raises(Unavailable, match="gone"):
        step.run()
    assert 119.8 < step.now <= 120.0


def test_patience_ends_before_the_time() -> None:
    step = Step(0.1, patience=3)
    with pytest.raises(Unavailable):
        step.run()
    assert 102.8 < step.now < 103.5


def test_patience_runs_from_the_first_failure() -> None:
    step = Step(10.0, patience=1, failures=1)
    assert step.run() == "done"


def test_without_patience_there_is_one_attempt() -> None:
    step = Step(0.1, patience=0)
    with pytest.raises(Unavailable):
        step.run()
    assert step.attempts == 1


def test_a_long_attempt_that_runs_out_of_time_is_no_outage() -> None:
    """One failure in the first second is not why the other nineteen were not enough."""
    step = Step(1.0, timeout=20)

    def attempt() -> Flow[str]:
        if step.attempts:
            step.seconds = math.inf
        return step.attempt()

    flow: Iterator[object] = persist(attempt, step.deadline)
    with pytest.raises(DeadlineExceeded):
        list(flow)


def test_a_step_that_gets_on_in_between_has_its_patience_back() -> None:
    step = Step(0.1, patience=3, failures=50)
    failures = Failures(step.deadline)
    inner = step.attempt

    def attempt() -> Flow[str]:
        failures.forget()
        return inner()

    step.attempt = attempt  # type: ignore[method-assign]
    assert step.run(failures) == "done"
    # Waits stay those of a first failure.
    assert step.now < 100 + 51 * 0.1 + 50 * 0.1 + 0.01
