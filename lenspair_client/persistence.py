"""The flow that makes a failed step of a request again, while that can help and there is time."""

import random
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from lenspair_client import retry
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Method, Sleep, Unary
from lenspair_client.errors import DeadlineExceeded, LenspairRpcError

T = TypeVar("T")


class Failures:
    """Those of one step, since it last got on."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._count = 0
        self._first_at = 0.0
        self._last: LenspairRpcError | None = None

    def forget(self) -> None:
        """The step gets on."""
        self._count = 0
        self._last = None

    def wait_after(self, error: LenspairRpcError) -> float | None:
        """Notes a failure; seconds until the next attempt, None when there is none."""
        now = self._deadline.elapsed()
        if self._count == 0:
            self._first_at = now
        self._count += 1
        self._last = error
        left = self._deadline.remaining_for_failures(now - self._first_at)
        jitter = random.random()  # noqa: S311  no secret
        return retry.wait_before_repeating(error, self._count, left, jitter)

    def reason(self, error: LenspairRpcError, began: float) -> LenspairRpcError:
        """Why the step failed in the end, when its last attempt (begun after so many seconds) did so.

        Running out of time is the reason only where the last attempt took longer than the failures before.
        """
        if self._last is None or not isinstance(error, DeadlineExceeded):
            return error
        failing = began - self._first_at
        return error if self._deadline.elapsed() - began > failing else self._last


def persist(
    attempt: Callable[[], Flow[T]],
    deadline: Deadline,
    failures: Failures | None = None,
    helps: Callable[[LenspairRpcError], bool] = retry.may_pass,
) -> Flow[T]:
    """The value of the first attempt that succeeds.

    Attempts end with an error that another one would not help (`helps` says so), or when the request has
    no time or patience left. Whoever passes `failures` forgets them whenever an attempt gets on.
    """
    failures = failures or Failures(deadline)
    while True:
        began = deadline.elapsed()
        try:
            return (yield from attempt())
        except LenspairRpcError as error:
            wait = failures.wait_after(error) if helps(error) else None
            if wait is None:
                reason = failures.reason(error, began)
                if reason is error:
                    raise
                raise reason from error
        yield Sleep(wait)
        deadline.repeated += 1


def call(method: Method, request: Message, deadline: Deadline) -> Flow[Any]:
    """The response of a unary call, made again where that helps."""

    def call_once() -> Flow[Any]:
        return (yield Unary(method, request, deadline.for_next_call()))

    return persist(call_once, deadline)
