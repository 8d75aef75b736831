"""Sizes and times as people read and write them; pure."""

import re
from datetime import datetime

_UNITS = {"d": 86_400, "h": 3600, "min": 60, "m": 60, "s": 1}
_PART = r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s)"
_SPAN = re.compile(rf"{_PART}(\s*{_PART})*")


def size(num_bytes: int) -> str:
    """Bytes in decimal units, with three digits at the least: 999 B, 1.23 MB."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def span(seconds: float) -> str:
    """A length of time by its two largest units: 2 h 5 min. Less than nothing is nothing."""
    left = max(0, round(seconds))
    parts = []
    for unit in ("d", "h", "min", "s"):
        count, left = divmod(left, _UNITS[unit])
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def moment(time: datetime) -> str:
    """A point in time to the second."""
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def seconds_of(text: str) -> float:
    """The seconds of a length of time such as 2h, 90min or 1h30m.

    Raises:
        ValueError: it is none.
    """
    if not _SPAN.fullmatch(text.strip()):
        raise ValueError(f"not a length of time: {text!r}; 90s, 15m, 2h or 1d are")
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
