"""What became of the requests, fault by fault: as numbers, as a table, as a file; pure but for the file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.fault_load import Record

CALM = "calm"


@dataclass(frozen=True, slots=True)
class Window:
    """When a fault was there, by time.monotonic."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Of some requests. `lost`: the caller saw an error; `retried`: at least one step was made again."""

    requests: int
    lost: int
    wrong: int
    retried: int
    resumed: int
    worst_latency_seconds: float


def counts(records: Sequence[Record]) -> Counts:
    return Counts(
        requests=len(records),
        lost=sum(bool(record.error) for record in records),
        wrong=sum(bool(record.difference) for record in records),
        retried=sum(record.repeated > 0 for record in records),
        resumed=sum(record.resumed > 0 for record in records),
        worst_latency_seconds=round(max((record.seconds for record in records), default=0.0), 2),
    )


def by_fault(records: Sequence[Record], windows: Sequence[Window]) -> dict[str, list[Record]]:
    """The requests that ran while a fault was there; one that met two belongs to the first."""
    groups: dict[str, list[Record]] = {CALM: [], **{window.name: [] for window in windows}}
    for record in records:
        met = (w.name for w in windows if record.began <= w.ended and w.began <= record.ended)
        groups[next(met, CALM)].append(record)
    return groups


def problems(records: Sequence[Record], windows: Sequence[Window]) -> list[str]:
    """Everything that must not be, in words; empty when all is well."""
    start = min((record.began for record in records), default=0.0)
    found = [
        f"{record.began - start:7.1f} s  {record.kind}: {record.error or record.difference}"
        for record in records
        if record.error or record.difference
    ]
    groups = by_fault(records, windows)
    found += [f"{name}: no request ran meanwhile" for name, group in groups.items() if not group]
    return found


def table(records: Sequence[Record], windows: Sequence[Window]) -> str:
    """One line for each fault."""
    lines = [
        f"{'':18} {'times':>5} {'requests':>8} {'lost':>5} {'wrong':>5} {'retried':>7} {'resumed':>7} "
        f"{'worst':>8}"
    ]
    groups = by_fault(records, windows)
    for name, group in [*groups.items(), ("all", list(records))]:
        times = len(windows) if name == "all" else sum(window.name == name for window in windows)
        row = counts(group)
        lines.append(
            f"{name:18} {times or '':>5} {row.requests:8} {row.lost:5} {row.wrong:5} {row.retried:7} "
            f"{row.resumed:7} {row.worst_latency_seconds:6.1f} s"
        )
    return "\n".join(lines)


def write(path: Path, records: Sequence[Record], windows: Sequence[Window]) -> None:
    """The same as JSON."""
    groups = by_fault(records, windows)
    injected = {name: sum(window.name == name for window in windows) for name in groups if name != CALM}
    result = {
        "injected": injected,
        **asdict(counts(records)),
        "by_fault": {name: asdict(counts(group)) for name, group in groups.items()},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
