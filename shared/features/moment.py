"""Points in time as records hold them: whole milliseconds since 1970; knows no record."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

MAX_MILLISECONDS: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND


def utc_now() -> datetime:
    return datetime.now(UTC)


def to_milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND


def from_milliseconds(milliseconds: int) -> datetime:
    """The point in time; at most `MAX_MILLISECONDS`, which end the year 9999."""
    return _EPOCH + milliseconds * _MILLISECOND
