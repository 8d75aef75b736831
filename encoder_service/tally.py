"""How many features each tenant was handed out, and how they came about; knows no requests.

Not metrics: those have a constant number of series, and so no tenants.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from shared.features.moment import utc_now

Kind = Literal["hit", "joined", "encoded", "missed"]


@dataclass(slots=True)
class Counts:
    """The counts of one tenant since a point in time; None before the first one."""

    since: datetime | None = None
    hit: int = 0
    joined: int = 0
    encoded: int = 0
    missed: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the features handed out that cost no computation."""
        free = self.hit + self.joined
        return free / (free + self.encoded) if free + self.encoded else None


class TenantTally:
    """Counts by tenant; of more than `max_tenants` the one that was quiet for longest is forgotten."""

    def __init__(self, max_tenants: int = 1000, now: Callable[[], datetime] = utc_now) -> None:
        self._max_tenants = max_tenants
        self._now = now
        self._counts: OrderedDict[str, Counts] = OrderedDict()

    def count(self, tenant: str, kind: Kind) -> None:
        """Counts one feature, or one that was not there."""
        counts = self._counts.setdefault(tenant, Counts())
        counts.since = counts.since or self._now()
        setattr(counts, kind, getattr(counts, kind) + 1)
        self._counts.move_to_end(tenant)
        if len(self._counts) > self._max_tenants:
            self._counts.popitem(last=False)

    def of(self, tenant: str) -> Counts:
        """The counts of a tenant as they are now; asking is no use of them."""
        return self._counts.get(tenant, Counts())
