"""Memory is lent to one holder at a time, whatever form the hold has."""

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.features.buffers import Buffer, BufferPool

MIB = 1024 * 1024

HOLDS: list[Callable[[Buffer], Any]] = [
    lambda lent: lent,
    lambda lent: lent[5:9],
    lambda lent: lent[8:][4:][2:],
    lambda lent: lent.data,
    lambda lent: lent.data[3:][4:],
    lambda lent: lent.view(np.int16)[1:],
    torch.from_numpy,
    lambda lent: torch.from_numpy(lent).view(torch.bfloat16).view(2, -1)[1],
    lambda lent: torch.from_numpy(lent)[4:].numpy()[2:],
    lambda lent: np.asarray(lent.data)[7:],
    lambda lent: np.from_dlpack(torch.from_numpy(lent)),
]


def address(lent: Buffer) -> int:
    return int(lent.ctypes.data)


@pytest.mark.parametrize("hold", HOLDS)
def test_memory_is_lent_again_only_when_the_last_hold_is_gone(hold: Callable[[Buffer], Any]) -> None:
    pool = BufferPool()
    lent = pool.take(2 * MIB)
    where = address(lent)
    held = hold(lent)
    del lent
    other = pool.take(2 * MIB)
    assert address(other) != where
    del held
    gc.collect()
    assert address(pool.take(2 * MIB)) == where
    del other


def test_sizes_that_are_nearly_equal_share_memory() -> None:
    pool = BufferPool()
    where = address(pool.take(10 * MIB - 5))
    lent = pool.take(10 * MIB - 4000)
    assert address(lent) == where
    assert lent.nbytes == 10 * MIB - 4000


def test_no_more_is_kept_than_was_said() -> None:
    pool = BufferPool(kept_bytes=3 * MIB)
    lent = [pool.take(2 * MIB) for _ in range(3)]
    addresses = {address(each) for each in lent}
    lent.clear()
    again = [pool.take(2 * MIB) for _ in range(2)]
    assert len(addresses & {address(each) for each in again}) >= 1
    assert pool.kept_bytes == 0
    again.clear()
    assert pool.kept_bytes == 2 * MIB


def test_threads_never_share() -> None:
    pool = BufferPool()
    mixed = []

    def use(number: int) -> None:
        for _ in range(200):
            lent = pool.take(MIB)
            lent[:16] = number
            lent[-16:] = number
            if not (bool((lent[:16] == number).all()) and bool((lent[-16:] == number).all())):
                mixed.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed


class Lending(RuleBasedStateMachine):
    """Whatever is taken, held and dropped: no two live holds lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(kept_bytes=12 * MIB)
        self.held: list[tuple[int, int, Any]] = []

    @rule(size=st.integers(MIB, 6 * MIB), hold=st.sampled_from(HOLDS))
    def take(self, size: int, hold: Callable[[Buffer], Any]) -> None:
        lent = self.pool.take(size - size % 16)
        self.held.append((address(lent), lent.nbytes, hold(lent)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @invariant()
    def nobody_overlaps(self) -> None:
        spans = sorted((start, start + size) for start, size, _ in self.held)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        assert self.pool.kept_bytes <= 12 * MIB


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
