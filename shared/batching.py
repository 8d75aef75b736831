"""The batcher: what may wait, what is due, when to wake. Pure: time is an argument, nothing sleeps or runs.

An item first **reserves** its place, as soon as its cost is known; while it is being prepared it counts
against the limits but can't be batched. Then it is **added**, and waits for its turn. Turns are first come,
first served: a batch takes items in order until one does not fit, so that no item is overtaken for ever.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch and the whole queue may hold. Costs are in the unit of the caller, e.g. patches."""

    max_batch_items: int
    max_batch_cost: int
    max_queue_items: int
    max_queue_cost: int
    window_seconds: float


@dataclass(slots=True, eq=False)
class Claim:
    """Who still wants a result: until when, and whether everybody has gone."""

    deadline: float
    cancelled: bool = False

    def extend(self, deadline: float) -> None:
        self.deadline = max(self.deadline, deadline)


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """One item in the queue. The claim may change while the item waits."""

    item: T
    cost: int
    arrived_at: float
    claim: Claim


@dataclass(frozen=True, slots=True)
class Dropped(Generic[T]):
    """Entries that left the queue because nobody waits for them any more."""

    expired: list[Entry[T]]
    cancelled: list[Entry[T]]


class Batcher(Generic[T]):
    """Holds waiting entries in order of arrival. Not thread-safe: one task owns it."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._entries: deque[Entry[T]] = deque()
        self._entries_cost = 0
        self._reserved_items = 0
        self._reserved_cost = 0

    @property
    def num_items(self) -> int:
        """Items that wait or are being prepared."""
        return len(self._entries) + self._reserved_items

    @property
    def cost(self) -> int:
        """Cost of the items that wait or are being prepared."""
        return self._entries_cost + self._reserved_cost

    def can_reserve(self, cost: int) -> bool:
        """True when there is room for one more item. An empty queue takes any single item."""
        if self.num_items == 0:
            return True
        return (
            self.num_items < self._limits.max_queue_items and self.cost + cost <= self._limits.max_queue_cost
        )

    def reserve(self, cost: int) -> None:
        """Takes a place in the queue for an item that is still being prepared."""
        self._reserved_items += 1
        self._reserved_cost += cost

    def release(self, cost: int) -> None:
        """Gives a reserved place back; also just before the item is added."""
        assert self._reserved_items > 0
        self._reserved_items -= 1
        self._reserved_cost -= cost

    def add(self, entry: Entry[T]) -> None:
        self._entries.append(entry)
        self._entries_cost += entry.cost

    def prune(self, now: float) -> Dropped[T]:
        """Removes what nobody waits for any more, before it costs anything."""
        cancelled = self._remove(lambda entry: entry.claim.cancelled)
        expired = self._remove(lambda entry: entry.claim.deadline <= now)
        return Dropped(expired=expired, cancelled=cancelled)

    def is_due(self, now: float) -> bool:
        """True when a batch is full, or its oldest entry has waited for the whole window."""
        if not self._entries:
            return False
        return (
            len(self._entries) >= self._limits.max_batch_items
            or self._entries_cost >= self._limits.max_batch_cost
            or now >= self._window_end()
        )

    def wake_at(self) -> float | None:
        """When to look again if nothing arrives before; None: not until something arrives."""
        if not self._entries:
            return None
        return min(self._window_end(), *(entry.claim.deadline for entry in self._entries))

    def take(self) -> list[Entry[T]]:
        """Removes and returns the next batch; an entry larger than a whole batch goes alone."""
        batch: list[Entry[T]] = []
        cost = 0
        while self._entries and len(batch) < self._limits.max_batch_items:
            following = self._entries[0].cost
            if batch and cost + following > self._limits.max_batch_cost:
                break
            batch.append(self._entries.popleft())
            cost += following
        self._entries_cost -= cost
        return batch

    def _window_end(self) -> float:
        return self._entries[0].arrived_at + self._limits.window_seconds

    def _remove(self, is_gone: Callable[[Entry[T]], bool]) -> list[Entry[T]]:
        gone = [entry for entry in self._entries if is_gone(entry)]
        if gone:
            self._entries = deque(entry for entry in self._entries if not is_gone(entry))
            self._entries_cost -= sum(entry.cost for entry in gone)
        return gone
