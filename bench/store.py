"""The feature store beside a bare socket and redis-py, and what narrower features lose: `make bench-store`.

Speeds are measured against the embedded server on this machine, through TCP and through a unix socket. A get
is a look-up and a fetch, with every byte checked; a decoder does other work between the two, so the fetch
is shown alone too. A put computes checksums. Answers and cosines are those of the demonstration checkpoint.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench import store_loss
from bench.store_plot import plot
from bench.store_speed import Speeds, Way, measure
from demo.embedded_store import EmbeddedStore
from demo.pair import DEMO_CHECKPOINT
from demo.ports import free_port

RESULTS: Final = Path(__file__).parent / "results" / "store.json"

Table = Mapping[Way, Mapping[int, Speeds]]


def measure_speeds(rounds: int) -> dict[str, Table]:
    """The speeds through TCP and through a unix socket."""
    tables: dict[str, Table] = {}
    for name, port in (("TCP", free_port()), ("unix socket", None)):
        with EmbeddedStore.start(port=port) as server:
            tables[name] = asyncio.run(measure(server.url, rounds=rounds))
    return tables


def report(name: str, table: Table) -> str:
    """The speeds of one kind of connection as lines of text."""
    lines = [
        f"MB/s through {name}",
        f"{'MiB':>4} {'':5} {'ours':>7} {'socket':>7} {'redis-py':>8}   of socket  of redis-py",
    ]
    for way, sizes in table.items():
        lines += [
            f"{size:4} {way:5} {speeds.ours:7.0f} {speeds.ceiling:7.0f} {speeds.redis_py:8.0f}"
            f" {speeds.ceiling_share:11.2f} {speeds.redis_py_ratio:12.2f}"
            for size, speeds in sizes.items()
        ]
    return "\n".join(lines)


def ratios(table: Table) -> dict[str, dict[str, float]]:
    """What the results file says of one kind of connection, by size."""
    return {
        f"{way}_{name}": {str(size): round(getattr(speeds, field), 3) for size, speeds in sizes.items()}
        for way, sizes in table.items()
        for name, field in (("ceiling_share", "ceiling_share"), ("ratio_redis_py", "redis_py_ratio"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds of each size (default: 15)")
    parser.add_argument("--no-loss", action="store_true", help="measure speeds only, and write no results")
    arguments = parser.parse_args()
    tables = measure_speeds(arguments.rounds)
    for name, table in tables.items():
        print(report(name, table), end="\n\n")
    if arguments.no_loss:
        return 0
    loss = store_loss.measure(DEMO_CHECKPOINT)
    print(store_loss.report(loss))
    results: dict[str, Any] = {**ratios(tables["TCP"]), "unix_socket": ratios(tables["unix socket"])}
    results |= {name: loss[name] for name in ("answers", "fp8_changed_answers", "fp8_min_cosine")}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    plot(tables, RESULTS.with_suffix(".png"))
    print(f"\nwritten: {RESULTS.relative_to(Path.cwd())}, and a plot beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
