"""The vision tower beside Transformers', and a known picture beside an empty call: `make bench-encoder`.

A generated checkpoint whose tower has about 35 M parameters, float32. Measured are 16 pictures of 512x512,
then 64 of 64 to 1024 pixels a side, in alternating rounds whose medians are compared: our tower,
Transformers' with all of them in one pass and with one picture at a time, and plain matrix products of
the same shapes, which are the ceiling. The pictures are preprocessed already. Then the medians of calls to a
running encoder that find their picture in the store. All of it takes about ten minutes on two cores.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from bench import encoder_hits
from bench.encoder_sides import (
    Products,
    Tower,
    Transformers,
    equal_pictures,
    mixed_pictures,
    num_patches,
)
from bench.generated_checkpoint import write_generated_checkpoint
from encoder_service.settings import EncoderSettings
from encoder_service.tower import Patches

RESULTS = Path(__file__).parent / "results" / "encoder.json"
PASS_PATCHES = EncoderSettings.model_fields["max_batch_patches"].default
BARS = {
    "ratio_equal_to_batch": ("at least", 1.3),
    "ratio_equal_to_single": ("at least", 1.1),
    "ratio_mixed": ("at least", 1.15),
    "ceiling_share": ("at least", 0.75),
    "hit_ratio_to_empty_call": ("at most", 2.0),
    "lookup_ratio_to_empty_call": ("at most", 2.0),
}
Speeds = Mapping[str, float]


def measure_towers(checkpoint: Path, rounds: int) -> dict[str, Speeds]:
    """Patches per second of each side, for each set of pictures."""
    ours, theirs, products = Tower(checkpoint), Transformers(checkpoint), Products(checkpoint)
    sets = {"equal": equal_pictures(checkpoint), "mixed": mixed_pictures(checkpoint)}
    speeds: dict[str, Speeds] = {}
    for name, pictures in sets.items():
        sides: dict[str, Callable[[Sequence[Patches]], float]] = {
            "ours": lambda all_: ours.seconds(all_, PASS_PATCHES),
            "batch": lambda all_: theirs.seconds(all_, len(all_)),
            "single": lambda all_: theirs.seconds(all_, 1),
            "ceiling": products.seconds,
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in tqdm(range(rounds + 1), desc=f"{name} sizes", leave=False, disable=None):
            for side, run in sides.items():
                seconds[side].append(run(pictures))
        total = num_patches(pictures)
        speeds[name] = {side: total / statistics.median(each[1:]) for side, each in seconds.items()}
    return speeds


def figures(speeds: Mapping[str, Speeds], hits: encoder_hits.Hits) -> dict[str, float]:
    equal, mixed = speeds["equal"], speeds["mixed"]
    return {
        "ratio_equal_to_batch": equal["ours"] / equal["batch"],
        "ratio_equal_to_single": equal["ours"] / equal["single"],
        "ratio_mixed": mixed["ours"] / max(mixed["batch"], mixed["single"]),
        "ceiling_share": equal["ours"] / equal["ceiling"],
        "hit_ratio_to_empty_call": hits.hit / hits.empty_large,
        "lookup_ratio_to_empty_call": hits.lookup / hits.empty_small,
    }


def report(speeds: Mapping[str, Speeds], hits: encoder_hits.Hits) -> int:
    """Prints both tables and writes the ratios; 1 when one misses its bar."""
    print(f"{'patches per second':24} {'Lenspair':>9} {'one pass':>9} {'one by one':>11} {'ceiling':>9}")
    for name, row in speeds.items():
        print(
            f"{name + ' sizes':24} {row['ours']:9.0f} {row['batch']:9.0f} {row['single']:11.0f} "
            f"{row['ceiling']:9.0f}"
        )
    for name, seconds in asdict(hits).items():
        print(f"{name:24} {1000 * seconds:9.2f} ms")
    ratios = figures(speeds, hits)
    missed = 0
    for name, value in ratios.items():
        direction, bar = BARS[name]
        missed += value < bar if direction == "at least" else value > bar
        print(f"{name:30} {value:6.3f}  (bar: {direction} {bar})")
    RESULTS.parent.mkdir(exist_ok=True)
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    RESULTS.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
    return min(missed, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: 7)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
        write_generated_checkpoint(Path(folder), "dense", size="vision")
        speeds = measure_towers(Path(folder), arguments.rounds)
    return report(speeds, encoder_hits.measure())


if __name__ == "__main__":
    sys.exit(main())
