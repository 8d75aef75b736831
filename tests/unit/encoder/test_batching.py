"""The batcher's rules, one scenario each."""

import pytest

from shared.batching import Batcher, BatchLimits, Claim, Entry

FAR = 1e9


def limits(
    *, batch_items: int = 4, batch_cost: int = 100, queue_items: int = 8, queue_cost: int = 400
) -> BatchLimits:
    return BatchLimits(
        max_batch_items=batch_items,
        max_batch_cost=batch_cost,
        max_queue_items=queue_items,
        max_queue_cost=queue_cost,
        window_seconds=0.5,
    )


def entry(name: str, cost: int = 10, arrived_at: float = 0.0, deadline: float = FAR) -> Entry[str]:
    return Entry(name, cost, arrived_at, Claim(deadline))


def filled(*entries: Entry[str], bounds: BatchLimits | None = None) -> Batcher[str]:
    batcher: Batcher[str] = Batcher(bounds or limits())
    for one in entries:
        batcher.add(one)
    return batcher


def names(entries: list[Entry[str]]) -> list[str]:
    return [one.item for one in entries]


def test_empty_is_never_due_and_never_wakes() -> None:
    batcher = filled()
    assert not batcher.is_due(FAR)
    assert batcher.wake_at() is None
    assert batcher.take() == []


def test_full_by_count_is_due_at_once() -> None:
    batcher = filled(*(entry(name) for name in "abcde"))
    assert batcher.is_due(0.0)
    assert names(batcher.take()) == ["a", "b", "c", "d"]
    assert not batcher.is_due(0.0)


def test_full_by_cost_is_due_at_once() -> None:
    batcher = filled(entry("a", 60), entry("b", 60))
    assert batcher.is_due(0.0)
    assert names(batcher.take()) == ["a"]
    assert batcher.cost == 60


def test_due_by_age_of_the_oldest() -> None:
    batcher = filled(entry("a", arrived_at=1.0), entry("b", arrived_at=1.4))
    assert batcher.wake_at() == 1.5
    assert not batcher.is_due(1.49)
    assert batcher.is_due(1.5)
    assert names(batcher.take()) == ["a", "b"]


def test_an_item_larger_than_the_budget_goes_alone() -> None:
    batcher = filled(entry("huge", 1000), entry("small", 1))
    assert names(batcher.take()) == ["huge"]
    assert names(batcher.take()) == ["small"]


def test_nobody_is_overtaken() -> None:
    batcher = filled(entry("a", 60), entry("large", 90), entry("b", 20))
    assert names(batcher.take()) == ["a"]
    assert names(batcher.take()) == ["large"]
    assert names(batcher.take()) == ["b"]


def test_expired_items_are_dropped_and_reported() -> None:
    batcher = filled(entry("late", deadline=0.2), entry("fine"))
    assert batcher.wake_at() == 0.2
    assert names(batcher.prune(0.1).expired) == []
    dropped = batcher.prune(0.2)
    assert (names(dropped.expired), names(dropped.cancelled)) == (["late"], [])
    assert names(batcher.take()) == ["fine"]


def test_cancelled_items_are_dropped_and_reported() -> None:
    gone = entry("gone", deadline=0.1)
    batcher = filled(gone, entry("fine"))
    gone.claim.cancelled = True
    dropped = batcher.prune(5.0)
    assert (names(dropped.expired), names(dropped.cancelled)) == ([], ["gone"])
    assert batcher.cost == 10


def test_a_claim_that_was_extended_does_not_expire() -> None:
    shared = entry("shared", deadline=0.2)
    shared.claim.extend(9.0)
    shared.claim.extend(0.1)
    assert names(filled(shared).prune(1.0).expired) == []


def test_the_queue_is_bounded_by_items_and_counts_reservations() -> None:
    batcher = filled(entry("a"), bounds=limits(queue_items=3))
    batcher.reserve(10)
    assert batcher.can_reserve(10)
    batcher.reserve(10)
    assert not batcher.can_reserve(10)
    batcher.release(10)
    assert batcher.can_reserve(10)
    assert (batcher.num_items, batcher.cost) == (2, 20)


def test_the_queue_is_bounded_by_cost() -> None:
    batcher = filled(entry("a", 300))
    assert batcher.can_reserve(100)
    assert not batcher.can_reserve(101)


def test_an_empty_queue_takes_an_item_of_any_cost() -> None:
    batcher = filled()
    assert batcher.can_reserve(10_000)
    batcher.reserve(10_000)
    assert not batcher.can_reserve(1)


@pytest.mark.parametrize("seed", range(20))
def test_every_item_leaves_once_and_in_order(seed: int) -> None:
    costs = [(seed * 7 + index * 13) % 130 for index in range(40)]
    batcher = filled(*(entry(str(index), cost) for index, cost in enumerate(costs)))
    taken: list[str] = []
    while batch := batcher.take():
        assert len(batch) == 1 or sum(one.cost for one in batch) <= 100
        taken += names(batch)
    assert taken == [str(index) for index in range(40)]
    assert batcher.cost == 0
