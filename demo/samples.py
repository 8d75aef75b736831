"""Owns the sample files and the questions about them; knows nothing of how answers are computed.

`python -m demo.samples` draws the files from fixed seeds and writes `demo/samples/questions.json`;
with `--check` it also asks the checkpoint and fails on a wrong answer or a narrow margin.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from demo import scenes
from demo.asking import Asker, Conversation
from demo.pictures import Picture, draw
from demo.pixels import fit

HERE = Path(__file__).parent
NARROW = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """A question about files of the samples folder, and its true answer."""

    files: tuple[str, ...]
    question: str
    answer: str


def sample_pictures() -> dict[str, Picture]:
    """File name to picture; the suffix decides the format."""
    rng = random.Random("samples")
    return {
        "red-circle.png": _clean((96, 96), [("red", "circle")], rng),
        "two-shapes.jpg": _clean((128, 96), [("blue", "square"), ("green", "triangle")], rng),
        "wide.webp": _clean((192, 128), [("orange", "circle"), ("purple", "cross")], rng),
        "small-cross.png": _clean((64, 64), [("cyan", "cross")], rng),
        "large-triangle.png": _clean((256, 256), [("yellow", "triangle")], rng),
        "number-42.png": replace(scenes.number((128, 96), "42", rng), noise=0, jpeg_quality=None),
        "three-shapes.jpg": _clean(
            (160, 160), [("red", "square"), ("blue", "circle"), ("red", "cross")], rng
        ),
        "tall.png": _clean((96, 160), [("green", "circle"), ("red", "triangle")], rng),
    }


def _clean(size: scenes.Size, names: list[tuple[str, str]], rng: random.Random) -> Picture:
    return replace(scenes.with_names(size, names, rng), noise=0.0, jpeg_quality=None, smooth=True)


def sample_questions(pictures: dict[str, Picture]) -> list[Question]:
    place = {name: [mark.zone or "" for mark in picture.marks] for name, picture in pictures.items()}
    circle, two, wide, tall = "red-circle.png", "two-shapes.jpg", "wide.webp", "tall.png"
    return [
        Question((circle,), "What colour is the circle?", "red"),
        Question((circle,), "Where is the red circle?", place[circle][0]),
        Question((two,), "Describe the picture.", "A blue square and a green triangle."),
        Question((two,), "What shape is the green one?", "triangle"),
        Question((wide,), "What do you see?", "An orange circle and a purple cross."),
        Question((wide,), "Is there a purple circle?", "no"),
        Question((wide,), f"What is in the {place[wide][1]}?", "a purple cross"),
        Question(("small-cross.png",), "What shape is this?", "cross"),
        Question(("large-triangle.png",), "Describe the picture.", "A yellow triangle."),
        Question(("number-42.png",), "What number is this?", "42"),
        Question(("three-shapes.jpg",), "How many shapes are there?", "three"),
        Question((two,), "How many shapes are there?", "two"),
        Question((tall,), "Which shape is red?", "triangle"),
        Question((circle, "small-cross.png"), "Which picture has the red circle?", "the first"),
        Question(("small-cross.png", circle), "Which picture has the red circle?", "the second"),
        Question(("small-cross.png", "large-triangle.png"),
                 "What colour is the shape in the second picture?", "yellow"),
        Question((), "What is two plus three?", "five"),
        Question((), "Say hello.", "Hello!"),
    ]  # fmt: skip


def write_samples(folder: Path) -> list[Question]:
    folder.mkdir(parents=True, exist_ok=True)
    pictures = sample_pictures()
    for name, picture in pictures.items():
        draw(picture).save(folder / name, quality=92)  # PNG has no quality and ignores it
    questions = sample_questions(pictures)
    entries = [
        {"files": list(item.files), "question": item.question, "answer": item.answer} for item in questions
    ]
    text = json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    (folder / "questions.json").write_text(text, encoding="utf-8")
    return questions


def check(asker: Asker, folder: Path, questions: list[Question]) -> bool:
    """Prints answer and margin of each; whether all are right and clear."""
    good = True
    for item in questions:
        images = tuple(fit(Image.open(folder / name).convert("RGB")) for name in item.files)
        asked = Conversation(((item.question, item.answer),), images)
        answer, lead = asker.answers([asked])[0], asker.margin(asked)
        good = good and answer == item.answer and lead >= NARROW
        sys.stdout.write(f"{lead:6.2f}  {item.question}  {answer!r} (expected {item.answer!r})\n")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.samples", description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE / "samples")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--check", action="store_true", help="ask the checkpoint as well")
    options = parser.parse_args()
    questions = write_samples(options.folder)
    if options.check and not check(Asker(options.checkpoint), options.folder, questions):
        sys.exit(f"a sample is answered wrong, or with a margin under {NARROW}")


if __name__ == "__main__":
    main()
