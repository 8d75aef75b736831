"""Steady callers of a pair, and what became of each of their requests; knows nothing of faults."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bench.fault_questions import Known
from lenspair_client import Answer, AsyncLenspairClient, LenspairClient, LenspairClientError

# Between two requests of one caller, so that the machine is busy and not swamped.
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """One request: when (by time.monotonic), how often repeated, and what went wrong with it, if anything.

    `error` is what the caller saw, `difference` how the answer was not the expected one.
    """

    began: float
    ended: float
    kind: str
    repeated: int = 0
    resumed: int = 0
    error: str = ""
    difference: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Load:
    """Callers that ask on and on, from entering the context until leaving it.

    Half of them use the asyncio client, half the blocking one, each has every kind of request. `records`
    grows while they run.
    """

    def __init__(
        self,
        encoders: str,
        decoders: str,
        known: Sequence[Known],
        *,
        callers: int = 6,
        deadline_seconds: float = 30.0,
        seed: int = 0,
    ) -> None:
        self.records: list[Record] = []
        self._targets = encoders, decoders
        self._known = list(known)
        self._callers = callers
        self._deadline = deadline_seconds
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(callers + 1)
        self._runs: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._runs = [self._threads.submit(self._ask_from_a_loop)]
        self._runs += [self._threads.submit(self._ask_blocking) for _ in range(self._callers // 2)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._threads.shutdown()
        if error is None:
            self.check()

    def check(self) -> None:
        """Raises what a caller died of, which is no outcome of a request but a fault of this bench."""
        for run in self._runs:
            if run.done():
                run.result()

    def _requests(self) -> Iterator[tuple[Known, bool]]:
        """What to ask next, and whether as a stream, until the load is over."""
        while not self._is_over.wait(0):
            number = next(self._numbers)
            known = self._rng.choice(self._known)
            # A number is never used twice, not even by the next run against the same store.
            yield known.with_new_pictures(time.time_ns()) if number % 2 else known, self._rng.random() < 0.6

    def _ask_blocking(self) -> None:
        with LenspairClient(*self._targets) as client:
            for known, is_stream in self._requests():
                call = _stream_blocking if is_stream else _whole_blocking
                began = time.monotonic()
                try:
                    self._note(began, known, is_stream, *call(client, known, self._deadline))
                except LenspairClientError as error:
                    self._note_lost(began, known, is_stream, error)
                time.sleep(_PAUSE_SECONDS)

    def _ask_from_a_loop(self) -> None:
        async def ask_all() -> None:
            async with AsyncLenspairClient(*self._targets) as client, asyncio.TaskGroup() as callers:
                for _ in range(self._callers - self._callers // 2):
                    callers.create_task(self._ask_async(client))

        asyncio.run(ask_all())

    async def _ask_async(self, client: AsyncLenspairClient) -> None:
        for known, is_stream in self._requests():
            call = _stream_async if is_stream else _whole_async
            began = time.monotonic()
            try:
                self._note(began, known, is_stream, *await call(client, known, self._deadline))
            except LenspairClientError as error:
                self._note_lost(began, known, is_stream, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _note(self, began: float, known: Known, is_stream: bool, text: str, answer: Answer) -> None:
        difference = ""
        if not text == answer.text == known.expected:
            difference = f"{known.text!r}: {text!r}, whole {answer.text!r}, expected {known.expected!r}"
        kind, now = _kind(known, is_stream=is_stream), time.monotonic()
        self.records.append(Record(began, now, kind, answer.repeated, answer.resumed, difference=difference))

    def _note_lost(self, began: float, known: Known, is_stream: bool, error: LenspairClientError) -> None:
        self.records.append(
            Record(began, time.monotonic(), _kind(known, is_stream=is_stream), error=str(error))
        )


def learn_answers(encoders: str, decoders: str, questions: Sequence[Known]) -> list[Known]:
    """The same questions with what the pair answers now, asked one after the other."""
    with LenspairClient(encoders, decoders) as client:
        return [known_after(question, client) for question in questions]


def known_after(question: Known, client: LenspairClient) -> Known:
    text, _ = _whole_blocking(client, question, 60.0)
    return Known(question.text, question.images, question.generation, text)


def _kind(known: Known, *, is_stream: bool) -> str:
    return f"{len(known.images)} pictures, {'streamed' if is_stream else 'whole'}"


def _whole_blocking(client: LenspairClient, known: Known, timeout: float) -> tuple[str, Answer]:
    answer = client.ask(known.text, known.images, generation=known.generation, timeout=timeout)
    return answer.text, answer


def _stream_blocking(client: LenspairClient, known: Known, timeout: float) -> tuple[str, Answer]:
    steps = client.ask_stream(known.text, known.images, generation=known.generation, timeout=timeout)
    return _joined(list(steps))


async def _whole_async(client: AsyncLenspairClient, known: Known, timeout: float) -> tuple[str, Answer]:  # noqa: ASYNC109
    answer = await client.ask(known.text, known.images, generation=known.generation, timeout=timeout)
    return answer.text, answer


async def _stream_async(client: AsyncLenspairClient, known: Known, timeout: float) -> tuple[str, Answer]:  # noqa: ASYNC109
    stream = client.ask_stream(known.text, known.images, generation=known.generation, timeout=timeout)
    async with aclosing(stream) as steps:
        return _joined([step async for step in steps])


def _joined(steps: Sequence[Any]) -> tuple[str, Answer]:
    *pieces, answer = steps
    return "".join(pieces), answer
