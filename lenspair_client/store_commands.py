"""`lenspair store`: an operator looks after the stored features of a tenant from a terminal."""

import argparse
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from lenspair_client import human, terminal
from lenspair_client.advice import EXIT_CODES_HELP, FAILED
from lenspair_client.client import LenspairClient
from lenspair_client.values import FeatureDescription, RequestCounts, StoreStats

Command = Callable[[argparse.Namespace, LenspairClient], int]
# Adds a command with its name, its one line of help and the options that all commands have.
Add = Callable[[Any, str, str, Command], argparse.ArgumentParser]


def add(commands: Any, add_command: Add) -> None:
    """Adds `store` and its own commands to those of `lenspair`."""
    text = "look after stored features: stats, show, evict, keep"
    store = commands.add_parser(
        "store", help=text, description=f"{text.capitalize()}.", epilog=EXIT_CODES_HELP
    )
    actions = store.add_subparsers(required=True, metavar="ACTION")

    add_command(actions, "stats", "count the tenant's stored features, and what this encoder did", _stats)
    show = add_command(actions, "show", "tell what is known of stored features (1: not all there)", _show)
    evict = add_command(actions, "evict", "delete stored features; those that are gone count as done", _evict)
    keep = add_command(actions, "keep", "let stored features live on (1: not all there)", _keep)
    for parser in (show, evict, keep):
        parser.add_argument("key", nargs="+", metavar="KEY", help="as encode --json prints it")
    time = keep.add_mutually_exclusive_group(required=True)
    time.add_argument("--for", type=_length, dest="seconds", metavar="TIME", help="such as 90s, 15m, 2h, 1d")
    time.add_argument("--seconds", type=float, metavar="N", help="the same in seconds")


def _stats(options: argparse.Namespace, client: LenspairClient) -> int:
    stats = client.store_stats(timeout=options.timeout)
    if options.json:
        terminal.show_json(_stats_fields(stats))
    else:
        terminal.show_rows(_stats_rows(stats, datetime.now(UTC)))
    return 0


def _show(options: argparse.Namespace, client: LenspairClient) -> int:
    descriptions = client.describe(options.key, timeout=options.timeout)
    for number, (key, description) in enumerate(zip(options.key, descriptions, strict=True)):
        if options.json:
            terminal.show_json({"key": key} | (_fields(description) if description else {"stored": False}))
        elif description is None:
            terminal.show_line(f"{key}: missing")
        else:
            if number:
                terminal.show_line("")
            terminal.show_rows(_rows(description, datetime.now(UTC)))
    return FAILED if None in descriptions else 0


def _evict(options: argparse.Namespace, client: LenspairClient) -> int:
    existed = client.evict(options.key, timeout=options.timeout)
    for key, was_there in zip(options.key, existed, strict=True):
        if options.json:
            terminal.show_json({"key": key, "existed": was_there})
        else:
            terminal.show_line(f"{key}: {'evicted' if was_there else 'was not there'}")
    return 0


def _keep(options: argparse.Namespace, client: LenspairClient) -> int:
    times = client.keep_alive(options.key, options.seconds, timeout=options.timeout)
    for key, time in zip(options.key, times, strict=True):
        if options.json:
            terminal.show_json({"key": key, "expires_at": _iso(time)})
        else:
            terminal.show_line(f"{key}: {f'until {human.moment(time)}' if time else 'missing'}")
    return FAILED if None in times else 0


def _rows(description: FeatureDescription, now: datetime) -> Iterator[tuple[str, str]]:
    feature = description.feature
    chunks = f"{description.num_chunks} chunk{'' if description.num_chunks == 1 else 's'}"
    yield "key", feature.key
    yield "grid", " x ".join(map(str, feature.grid))
    yield "tokens", str(feature.token_count)
    yield (
        "tensor",
        f"{description.dtype}, {1 + description.deepstack_levels} x {description.hidden_size} wide",
    )
    yield "size", f"{human.size(feature.size_bytes)} in {chunks}"
    yield "made", _ago(description.created_at, now)
    yield "expires", _until(feature.expires_at, now)
    yield "checkpoint", description.fingerprint


def _stats_rows(stats: StoreStats, now: datetime) -> Iterator[tuple[str, str]]:
    yield "features", str(stats.entries)
    yield "size", human.size(stats.size_bytes)
    yield "damaged", str(stats.damaged)
    if stats.entries:
        yield "oldest made", _ago(stats.oldest, now)
        yield "newest made", _ago(stats.newest, now)
        yield "first expires", _until(stats.first_expiry, now)
        yield "last expires", _until(stats.last_expiry, now)
    yield "this encoder", _counts(stats.requests)
    if stats.store_used_bytes is not None:
        limit = f"of {human.size(stats.store_max_bytes)}" if stats.store_max_bytes else "without a limit"
        yield "store memory", f"{human.size(stats.store_used_bytes)} {limit}"


def _counts(counts: RequestCounts) -> str:
    if counts.since is None:
        return "no request yet"
    rate = [] if counts.hit_rate is None else [f"hit rate {100 * counts.hit_rate:.0f} %"]
    kinds = [
        f"{counts.hits} hits",
        f"{counts.joined} joined",
        f"{counts.encoded} encoded",
        f"{counts.misses} missed",
    ]
    return f"{', '.join([*kinds, *rate])}, since {human.moment(counts.since)}"


def _ago(time: datetime | None, now: datetime) -> str:
    if time is None:
        return "unknown"
    return f"{human.moment(time)}, {human.span((now - time).total_seconds())} ago"


def _until(time: datetime | None, now: datetime) -> str:
    if time is None:
        return "unknown"
    return f"{human.moment(time)}, in {human.span((time - now).total_seconds())}"


def _fields(description: FeatureDescription) -> dict[str, object]:
    feature = description.feature
    return {
        "stored": True,
        "grid": feature.grid,
        "token_count": feature.token_count,
        "size_bytes": feature.size_bytes,
        "num_chunks": description.num_chunks,
        "dtype": description.dtype,
        "hidden_size": description.hidden_size,
        "deepstack_levels": description.deepstack_levels,
        "created_at": _iso(description.created_at),
        "expires_at": _iso(feature.expires_at),
        "fingerprint": description.fingerprint,
    }


def _stats_fields(stats: StoreStats) -> dict[str, object]:
    counts = stats.requests
    return {
        "entries": stats.entries,
        "size_bytes": stats.size_bytes,
        "damaged": stats.damaged,
        "oldest": _iso(stats.oldest),
        "newest": _iso(stats.newest),
        "first_expiry": _iso(stats.first_expiry),
        "last_expiry": _iso(stats.last_expiry),
        "requests": {
            "since": _iso(counts.since),
            "hits": counts.hits,
            "joined": counts.joined,
            "encoded": counts.encoded,
            "misses": counts.misses,
            "hit_rate": counts.hit_rate,
        },
        "store_used_bytes": stats.store_used_bytes,
        "store_max_bytes": stats.store_max_bytes,
    }


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _length(text: str) -> float:
    try:
        return human.seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
