"""The decoder engine beside Transformers' `generate` on the same features, in one run: `make bench-decoder`.

A generated checkpoint of about 74 M parameters, float32, one 512x512 picture for each of 16 requests.
Measured are (a) 16 answers of one length, (b) 64 answers of 8 to 256 tokens (log-uniform), which Transformers
gets as four static batches, and the time to the first token of pictures that were asked about before.
Encoding is no part of any figure. Sides alternate; medians over the rounds are compared.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from bench.decoder_sides import Ask, Engine, Run, Transformers
from bench.generated_checkpoint import write_generated_checkpoint

BATCH_SIZE = 16
EQUAL_TOKENS = 48
MIXED_REQUESTS = 64
SHORTEST, LONGEST = 8, 256
RESULTS = Path(__file__).parent / "results" / "decoder.json"
BARS = {
    "decode_ratio_equal": ("at least", 1.25),
    "decode_ratio_mixed": ("at least", 3.0),
    "ttft_ratio_new_question": ("at most", 0.15),
    "ttft_ratio_same_question": ("at most", 0.10),
}


@dataclass(slots=True)
class Measured:
    """Seconds, round by round."""

    prompt_tokens: int = 0
    reference_prefill: list[float] = field(default_factory=list)
    reference_decode: list[float] = field(default_factory=list)
    reference_mixed: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)
    equal: list[Run] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    first_tokens: dict[str, list[float]] = field(default_factory=dict)


def mixed_lengths(seed: int = 0) -> list[int]:
    """Log-uniform from `SHORTEST` to `LONGEST`."""
    rng = random.Random(seed)
    return [
        round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(MIXED_REQUESTS)
    ]


class Benchmark:
    """Asks both sides in turn. A picture gets a new id whenever it is to be new to the prefix cache."""

    def __init__(self, reference: Transformers, engine: Engine, name: str) -> None:
        self._reference = reference
        self._engine = engine
        self._name = name
        self._ids = 0
        self.measured = Measured()

    async def equal_round(self) -> None:
        """(a)"""
        asks = self._asks([EQUAL_TOKENS] * BATCH_SIZE)
        self.measured.prompt_tokens = self._reference.prompt_tokens(asks)
        self.measured.equal.append(await self._engine.run(asks))
        first = self._reference.seconds(asks, 1)
        self.measured.reference_prefill.append(first)
        self.measured.reference_decode.append(self._reference.seconds(asks, EQUAL_TOKENS) - first)
        self.measured.products += [self._engine.seconds_of_products(BATCH_SIZE) for _ in range(10)]

    async def mixed_round(self) -> None:
        """(b)"""
        asks = self._asks(mixed_lengths())
        self.measured.mixed.append(max((await self._engine.run(asks)).ends))
        batches = [asks[first : first + BATCH_SIZE] for first in range(0, len(asks), BATCH_SIZE)]
        self.measured.reference_mixed.append(
            sum(self._reference.seconds(batch, max(a.output_tokens for a in batch)) for batch in batches)
        )

    async def reuse_round(self) -> None:
        """First tokens of new pictures, of known ones with a new question, and with the same one."""
        cold = self._asks([1] * BATCH_SIZE)
        new = [Ask(a.picture, "How many shapes are there?", 1, a.feature_id) for a in cold]
        for name, asks in (("cold", cold), ("new question", new), ("same question", cold)):
            self._note(f"16 at once, {name}", (await self._engine.run(asks)).prefill_seconds)
        alone = self._asks([1])
        other = [Ask(alone[0].picture, new[0].question, 1, alone[0].feature_id)]
        for name, asks in (("cold", alone), ("new question", other), ("same question", alone)):
            self._note(f"one alone, {name}", (await self._engine.run(asks)).prefill_seconds)

    def _note(self, name: str, seconds: float) -> None:
        self.measured.first_tokens.setdefault(name, []).append(seconds)

    def _asks(self, lengths: Sequence[int]) -> list[Ask]:
        self._ids += 1
        return [
            Ask(
                number % BATCH_SIZE,
                "Describe the picture.",
                length,
                f"{self._name}/{self._ids}/{number}".encode(),
            )
            for number, length in enumerate(lengths)
        ]


async def measure(checkpoint: Path, rounds: int, mixed_rounds: int) -> Measured:
    """Runs everything once to warm up, and then in turn."""
    reference = Transformers(checkpoint, BATCH_SIZE)
    engine = Engine.open(checkpoint, [reference.bundle(number) for number in range(BATCH_SIZE)])
    steps = [Benchmark.equal_round, Benchmark.reuse_round] * rounds + [Benchmark.mixed_round] * mixed_rounds
    async with engine.running():
        await Benchmark(reference, engine, "warm-up").equal_round()
        benchmark = Benchmark(reference, engine, "measured")
        for step in tqdm(steps, desc="rounds", leave=False, disable=None):
            await step(benchmark)
    return benchmark.measured


def ratios(measured: Measured) -> dict[str, float]:
    """What is compared: above 1 ours is faster, but for first tokens, where less is."""
    median = statistics.median
    first = {name: median(values) for name, values in measured.first_tokens.items()}
    ours_decode = median(run.tokens_after_prefill / run.decode_seconds for run in measured.equal)
    theirs_decode = BATCH_SIZE * (EQUAL_TOKENS - 1) / median(measured.reference_decode)
    return {
        "decode_ratio_equal": ours_decode / theirs_decode,
        "decode_ratio_mixed": median(measured.reference_mixed) / median(measured.mixed),
        "ttft_ratio_new_question": first["16 at once, new question"] / first["16 at once, cold"],
        "ttft_ratio_same_question": first["16 at once, same question"] / first["16 at once, cold"],
        "ttft_ratio_new_question_alone": first["one alone, new question"] / first["one alone, cold"],
        "ttft_ratio_same_question_alone": first["one alone, same question"] / first["one alone, cold"],
        "prefill_ratio": median(measured.reference_prefill)
        / median(run.prefill_seconds for run in measured.equal),
    }


def report(measured: Measured) -> Mapping[str, float]:
    """Prints both sides and the ceiling."""
    median = statistics.median
    tokens = measured.prompt_tokens
    step_tokens = BATCH_SIZE * (EQUAL_TOKENS - 1)
    mixed_tokens = sum(mixed_lengths())
    ours_prefill = tokens / median(run.prefill_seconds for run in measured.equal)
    ours_decode = median(run.tokens_after_prefill / run.decode_seconds for run in measured.equal)
    print(f"{tokens // BATCH_SIZE} prompt tokens each, {torch.get_num_threads()} threads, float32, CPU")
    print(f"{'':34} {'Lenspair':>9} {'generate':>9} {'ceiling':>9}")
    rows = [
        ("prefill, tokens/s", ours_prefill, tokens / median(measured.reference_prefill), math.nan),
        (
            f"decode, {BATCH_SIZE} of equal length, tokens/s",
            ours_decode,
            step_tokens / median(measured.reference_decode),
            BATCH_SIZE / min(measured.products),
        ),
        (
            f"{MIXED_REQUESTS} of mixed lengths, tokens/s",
            mixed_tokens / median(measured.mixed),
            mixed_tokens / median(measured.reference_mixed),
            math.nan,
        ),
    ]
    for name, ours, theirs, ceiling in rows:
        shown = "" if math.isnan(ceiling) else f"{ceiling:9.0f}"
        print(f"{name:34} {ours:9.0f} {theirs:9.0f} {shown:>9}")
    for name, values in measured.first_tokens.items():
        print(f"first token, {name:28} {1000 * median(values):9.1f} ms")
    compared = ratios(measured)
    for name, value in compared.items():
        bar = f"  (bar: {BARS[name][0]} {BARS[name][1]})" if name in BARS else ""
        print(f"{name:34} {value:9.3f}{bar}")
    return compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of (a) (default: 5)")
    parser.add_argument(
        "--mixed-rounds", type=int, default=1, help="rounds of (b), a minute each (default: 1)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
        write_generated_checkpoint(Path(folder), "dense", size="medium")
        measured = asyncio.run(measure(Path(folder), arguments.rounds, arguments.mixed_rounds))
    compared = report(measured)
    RESULTS.parent.mkdir(exist_ok=True)
    rounded = {name: round(value, 3) for name, value in compared.items()}
    RESULTS.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    is_met = [
        compared[name] >= bar if kind == "at least" else compared[name] <= bar
        for name, (kind, bar) in BARS.items()
    ]
    return 0 if all(is_met) else 1


if __name__ == "__main__":
    sys.exit(main())
