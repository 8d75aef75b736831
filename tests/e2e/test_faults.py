"""A short fault test: nothing is lost and nothing is wrong while a decoder and the store go away."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from bench.fault_kinds import Fault, kill_and_start, kill_store
from bench.fault_report import by_fault, counts, problems
from bench.faults import run, start_pair
from demo.pair import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield start_pair(stack)


FAULTS = [
    Fault("decoder killed", lambda pair: kill_and_start(pair.decoders[1])),
    Fault("store killed", kill_store),
]


def test_callers_notice_nothing_of_a_killed_decoder_and_a_lost_store(pair: Pair) -> None:
    records, windows = run(pair, FAULTS, callers=4, num_questions=12)
    assert problems(records, windows) == []
    # Otherwise the faults would have hit nobody.
    assert counts(by_fault(records, windows)["store killed"]).retried > 0
