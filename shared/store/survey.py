"""What is known of all features of one tenant together; knows no store."""

from dataclasses import dataclass
from datetime import datetime

from shared.features.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """Bytes that the whole store uses, for all tenants and all else in it; a limit of 0 is none."""

    used_bytes: int
    max_bytes: int


@dataclass(slots=True)
class Survey:
    """A count of features, by their manifests.

    `size_bytes` are those of the tensors. Times are None while nothing was counted; features that do not
    say when they were made do not count in `oldest` and `newest`. `damaged` are manifests that can't be
    read. `memory` is None where the store does not tell.
    """

    entries: int = 0
    size_bytes: int = 0
    damaged: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None
    first_expiry: datetime | None = None
    last_expiry: datetime | None = None
    memory: StoreMemory | None = None

    def add(self, manifest: Manifest, expires_at: datetime) -> None:
        """Counts one feature."""
        self.entries += 1
        self.size_bytes += manifest.size_bytes
        self.oldest = _earlier(self.oldest, manifest.created_at)
        self.newest = _later(self.newest, manifest.created_at)
        self.first_expiry = _earlier(self.first_expiry, expires_at)
        self.last_expiry = _later(self.last_expiry, expires_at)


def _earlier(left: datetime | None, right: datetime | None) -> datetime | None:
    return min((moment for moment in (left, right) if moment is not None), default=None)


def _later(left: datetime | None, right: datetime | None) -> datetime | None:
    return max((moment for moment in (left, right) if moment is not None), default=None)
