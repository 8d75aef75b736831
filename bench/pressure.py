"""How neighbours fare while others misbehave: `make bench-pressure`.

A few steady callers stream answers from a running pair. Their latencies are measured alone, and then beside
each kind of trouble (see pressure_troubles.py), which is made once every few seconds. After each, everybody
must have left the decoder within a second. All of it happens twice: what memory the first round took for
good, the second must not take again.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

from bench.decoder_metrics import DecoderMetrics
from bench.generated_checkpoint import write_generated_checkpoint
from bench.pressure_neighbours import LEAVE_SECONDS, Outcome, Pressure
from bench.pressure_troubles import BATCH, QUEUE, TROUBLES, PressureFailed, steady_queue
from demo.pair import Pair
from demo.ports import free_port

# Small enough to be in use as a whole after the warm-up: its pages come with their first use.
KV_CACHE_BYTES = 32 * 1024**2
RESULTS = Path(__file__).parent / "results" / "pressure.json"


@dataclass(frozen=True, slots=True)
class Pressed:
    """Both rounds' outcomes by trouble, and what was seen with a queue that stays half full."""

    rounds: tuple[list[Outcome], list[Outcome]]
    growth_mb: tuple[float, float]
    steady: str


async def measure(checkpoint: Path, seconds: float, steady_seconds: float) -> Pressed:
    """Every trouble in turn, twice, on one decoder. Raises PressureFailed."""
    port = free_port()
    own = {
        "LENSPAIR_METRICS_PORT": str(port),
        "LENSPAIR_MAX_WAITING": str(QUEUE),
        "LENSPAIR_MAX_BATCH_SIZE": str(BATCH),
        "LENSPAIR_KV_CACHE_BYTES": str(KV_CACHE_BYTES),
        "LENSPAIR_MAX_BATCH_TOKENS": "256",
        "LENSPAIR_TORCH_THREADS": "0",
    }
    with Pair(checkpoint, decoder_environment=own) as pair:
        process = psutil.Process(pair.decoder.pid)
        pressure = Pressure(pair.decoder.address, DecoderMetrics(port), process)
        first, first_growth = await _round(pressure, process, seconds, "first round")
        second, second_growth = await _round(pressure, process, seconds, "second round")
        steady = await steady_queue(pressure, steady_seconds)
        await pressure.close()
    return Pressed((first, second), (first_growth, second_growth), steady)


async def _round(
    pressure: Pressure, process: psutil.Process, seconds: float, name: str
) -> tuple[list[Outcome], float]:
    before = process.memory_info().rss
    bar = tqdm(TROUBLES.items(), desc=name, leave=False, disable=None)
    outcomes = [await pressure.beside(name, trouble, seconds) for name, trouble in bar]
    return outcomes, (process.memory_info().rss - before) / 1e6


def _row(outcome: Outcome) -> dict[str, float]:
    first, between = outcome.latencies.first, outcome.latencies.between
    return {
        "first_token_ms_p50": 1000 * statistics.median(first),
        "first_token_ms_p95": 1000 * _p95(first),
        "between_tokens_ms_p50": 1000 * statistics.median(between),
        "between_tokens_ms_p95": 1000 * _p95(between),
        "growth_mb": outcome.growth_mb,
    }


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def report(pressed: Pressed) -> int:
    """Prints a line for each trouble of the second round; 1 when somebody stayed in the decoder."""
    rows = {outcome.name: _row(outcome) for outcome in pressed.rounds[1]}
    print(f"{'neighbours, beside':28} {'first token p50 p95':>21} {'next p50 p95':>17} {'memory':>9}")
    for outcome in pressed.rounds[1]:
        row = rows[outcome.name]
        print(
            f"{outcome.name:28} {row['first_token_ms_p50']:9.0f} {row['first_token_ms_p95']:8.0f} ms "
            f"{row['between_tokens_ms_p50']:6.1f} {row['between_tokens_ms_p95']:7.1f} ms "
            f"{row['growth_mb']:+6.1f} MB  {outcome.note}"
        )
    print(f"a queue of {QUEUE // 2} all the time: {pressed.steady}")
    print("memory: {:+.1f} MB in the first round, {:+.1f} MB in the second".format(*pressed.growth_mb))
    rounded = {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}
    growth = dict(zip(("first", "second"), (round(value, 1) for value in pressed.growth_mb), strict=True))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"beside": rounded, "round_growth_mb": growth}, indent=2) + "\n", encoding="utf-8"
    )
    stayed = [each.name for outcomes in pressed.rounds for each in outcomes if not each.has_emptied]
    if stayed:
        print(f"somebody stayed longer than {LEAVE_SECONDS:.0f} s after: {', '.join(stayed)}")
    return 1 if stayed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=9, help="time for each trouble (default: 9)")
    parser.add_argument(
        "--steady-seconds", type=float, default=60, help="time with a queue half full (default: 60)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
        write_generated_checkpoint(Path(folder), "dense")
        try:
            return report(asyncio.run(measure(Path(folder), arguments.seconds, arguments.steady_seconds)))
        except PressureFailed as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
