"""How the `lenspair` command writes: answers to standard output, everything about them to standard error."""

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from lenspair_client.values import Feature

# What could move the cursor or change the terminal; line feeds and tabs may stay.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_piece(text: str) -> None:
    """The next piece of an answer, at once."""
    sys.stdout.write(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def end_pieces() -> None:
    """The answer is whole."""
    show_line("")


def show_line(text: str) -> None:
    """A line of output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show_json(value: object) -> None:
    """A line of JSON."""
    show_line(json.dumps(value, ensure_ascii=False))


def show_feature(image: Path, feature: Feature | None, *, as_json: bool) -> None:
    """What is known of a picture's features."""
    if as_json:
        show_json({"file": str(image)} | (_feature_fields(feature) if feature else {"outcome": "missing"}))
    elif feature is None:
        show_line(f"{image}: missing")
    else:
        size = f"{feature.token_count} tokens, {feature.size_bytes / 1e6:.2f} MB"
        show_line(f"{image}: {feature.outcome}, {size}, until {feature.expires_at:%Y-%m-%d %H:%M:%S} UTC")


def show_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Lines of a name and a value, the values below one another."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        show_line(f"{name:<{width}}{value}")


def note(text: str, *, always: bool) -> None:
    """A dim line beside the answer, for people; `always`: for files too."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n")
    elif always:
        sys.stderr.write(f"{text}\n")


def complain(text: str) -> None:
    """Why the command failed."""
    sys.stderr.write(f"lenspair: {text}\n")


def abandon_output() -> None:
    """Nobody reads any more: nothing may fail on that when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _feature_fields(feature: Feature) -> dict[str, object]:
    return {
        "outcome": feature.outcome,
        "key": feature.key,
        "grid": feature.grid,
        "token_count": feature.token_count,
        "size_bytes": feature.size_bytes,
        "expires_at": feature.expires_at.isoformat(),
    }
