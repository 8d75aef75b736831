"""Sizes and times as people read and write them."""

from datetime import UTC, datetime

import pytest

from lenspair_client import human


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (16_800_000, "16.8 MB"),
        (3 * 10**9, "3 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert human.size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (3601, "1 h"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert human.span(seconds) == text


def test_moments() -> None:
    assert human.moment(datetime(2026, 5, 4, 3, 2, 1, 999, tzinfo=UTC)) == "2026-05-04 03:02:01 UTC"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("15min", 900),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1 d", 86_400),
        ("0.5h", 1800),
    ],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert human.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "nan", "inf s", "-2h", "2h x", "1e3s", "2w", "2hs"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="not a length of time"):
        human.seconds_of(text)
