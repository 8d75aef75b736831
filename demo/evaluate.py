"""Owns the examination of a checkpoint on held-out pictures; knows nothing of how it was trained.

`python -m demo.evaluate` asks every kind of question through the unmodified Transformers classes
(float32, greedy), counts exact matches, prints a table and fails below the bars.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from demo.asking import Asker, as_conversation
from demo.curriculum import held_out
from demo.questions import KINDS, Example

HERE = Path(__file__).parent
OVERALL_BAR = 0.95
KIND_BAR = 0.90
TOGETHER = 20


def exam(kind: str, index: int, seed: int) -> Example:
    """A held-out example that ends with the question to answer."""
    example = held_out(kind, index, seed)
    asked = 2 if kind == "follow-up" else 1
    return replace(example, turns=example.turns[:asked])


def right_answers(asker: Asker, kind: str, count: int, seed: int, misses: Counter[str]) -> int:
    right = 0
    for start in range(0, count, TOGETHER):
        examples = [exam(kind, index, seed) for index in range(start, min(start + TOGETHER, count))]
        answers = asker.answers([as_conversation(example) for example in examples])
        for example, answer in zip(examples, answers, strict=True):
            question, truth = example.turns[-1]
            right += answer == truth
            if answer != truth:
                misses[f"{kind}: {question} {truth!r}, answered {answer!r}"] += 1
    return right


def table(rights: dict[str, int], count: int) -> str:
    lines = ["| kind | right | of | share |", "| --- | ---: | ---: | ---: |"]
    for kind, right in rights.items():
        lines.append(f"| {kind} | {right} | {count} | {right / count:.1%} |")
    total, asked = sum(rights.values()), count * len(rights)
    lines.append(f"| **all** | {total} | {asked} | {total / asked:.1%} |")
    return "\n".join(lines)


def passes(rights: dict[str, int], count: int) -> bool:
    overall = sum(rights.values()) / (count * len(rights))
    return overall >= OVERALL_BAR and min(rights.values()) / count >= KIND_BAR


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--per-kind", type=int, default=200, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=1000, help="which held-out pictures")
    parser.add_argument("--misses", type=int, default=0, help="how many wrong answers to show")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    asker = Asker(options.checkpoint)
    misses: Counter[str] = Counter()
    rights = {
        kind: right_answers(asker, kind, options.per_kind, options.seed, misses)
        for kind in tqdm(KINDS, "kinds", leave=False)
    }
    text = table(rights, options.per_kind)
    sys.stdout.write(text + "\n")
    for miss, times in misses.most_common(options.misses):
        sys.stdout.write(f"{times} x {miss}\n")
    if options.write:
        options.write.write_text(_document(text, options.seed), encoding="utf-8")
    if not passes(rights, options.per_kind):
        sys.exit(f"below the bars: {OVERALL_BAR:.0%} overall, {KIND_BAR:.0%} for each kind")


def _document(text: str, seed: int) -> str:
    return (
        "# What the demonstration checkpoint can do\n\n"
        "Greedy answers of `demo/checkpoint` through the unmodified Transformers classes in float32\n"
        "on held-out pictures, exact match of the whole answer. Made by\n"
        f"`python -m demo.evaluate --seed {seed} --write demo/EVALUATION.md`.\n\n"
        f"{text}\n\n"
        "The weights went through the stages of `demo/curriculum.py`, some of which were changed while they\n"
        "ran. A fresh `python -m demo.train` makes a model of the same kind, not the same weights.\n"
    )


if __name__ == "__main__":
    main()
