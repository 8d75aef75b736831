"""Owns the stages of the training and what each is fed; knows nothing of tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from demo import scenes
from demo.pixels import native_size
from demo.questions import KINDS, Example, make_example

SMALL: tuple[scenes.Size, ...] = (
    (64, 64), (96, 64), (64, 96), (96, 96), (96, 96), (128, 96), (96, 128), (128, 128),
)  # fmt: skip
MIDDLE: tuple[scenes.Size, ...] = (
    (128, 128), (128, 64), (64, 128), (160, 128), (128, 160), (160, 96), (96, 160), (160, 160),
    (192, 128), (128, 192),
)  # fmt: skip
LARGE: tuple[scenes.Size, ...] = (
    (192, 192), (224, 160), (160, 224), (256, 128), (128, 256), (224, 224), (256, 192), (192, 256),
    (256, 256),
)  # fmt: skip
SIZES = tuple(dict.fromkeys(SMALL + MIDDLE + LARGE))
CLIP_KINDS = ("motion", "order")
STILL_KINDS = tuple(kind for kind in KINDS if kind not in CLIP_KINDS and kind != "follow-up")
PATCHES_A_STEP = 2304


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of training. `kinds` are weights; `sizes` weigh small, middle and large pictures;
    `clips` is the share of steps that are about clips; without `answers` only the tower learns."""

    name: str
    steps: int
    rate: float
    kinds: Mapping[str, float]
    sizes: tuple[float, float, float]
    most_marks: int = 2
    clips: float = 0.0
    answers: bool = True
    sight_weight: float = 0.5
    batch_size: int = 32
    last_rate: float = field(default=0.15)


_EVEN = dict.fromkeys(STILL_KINDS, 1.0)
_HARD = _EVEN | {
    "number": 2.5,
    "position": 1.5,
    "exists": 1.5,
    "which picture": 1.3,
    "text only": 0.8,
}

_WRONG = {
    "colour": 3.0, "shape": 0.6, "count": 1.5, "position": 2.5, "place": 1.0, "exists": 1.5,
    "describe": 1.0, "number": 2.5, "which picture": 3.0, "of two pictures": 0.7, "text only": 0.6,
}  # fmt: skip

_LAST = {
    "colour": 1.2, "shape": 0.8, "count": 1.8, "position": 2.0, "place": 1.2, "exists": 1.2,
    "describe": 1.5, "number": 2.5, "which picture": 2.2, "of two pictures": 0.7, "text only": 0.6,
}  # fmt: skip

STAGES: tuple[Stage, ...] = (
    Stage("one thing seen", 500, 2e-3, {"colour": 3.0, "number": 1.0}, (1, 0, 0), 1,
          answers=False, sight_weight=1.0, last_rate=0.7),
    Stage("many things seen", 1000, 1.5e-3, {"describe": 2.0, "number": 1.0}, (0.7, 0.2, 0.1), 3,
          answers=False, sight_weight=1.0, last_rate=0.7),
    Stage("everything asked about", 1250, 1.5e-3, _HARD, (0.68, 0.24, 0.08), clips=0.15,
          sight_weight=0.5, last_rate=0.7),
    Stage("a second look", 1300, 1.5e-3, {"describe": 2.0, "number": 2.0}, (0.7, 0.22, 0.08), 4,
          answers=False, sight_weight=1.0, last_rate=0.7),
    Stage("everything asked again", 1250, 1.5e-3, _HARD, (0.68, 0.24, 0.08), clips=0.15,
          sight_weight=1.0, last_rate=0.6),
    Stage("listening to hard ones", 2500, 1.5e-3, _HARD, (0.68, 0.24, 0.08), clips=0.2,
          sight_weight=1.0, last_rate=0.5),
    Stage("what is still wrong", 3000, 1.5e-3, _WRONG, (0.8, 0.16, 0.04), 2, clips=0.1,
          sight_weight=1.0, last_rate=0.7),
    Stage("polish", 1700, 1.4e-3, _LAST, (0.58, 0.27, 0.15), 2, clips=0.1,
          sight_weight=0.7, last_rate=0.01),
)  # fmt: skip


def step_examples(stage: Stage, stage_index: int, step: int, seed: int) -> list[Example]:
    """The examples of one training step: a pure function of its arguments."""
    rng = random.Random(f"train/{seed}/{stage_index}/{step}")
    if stage.answers and rng.random() < stage.clips:
        sizes = (_native(SMALL, rng), _native(SMALL, rng))
        kinds = rng.choices(CLIP_KINDS, (3, 1), k=stage.batch_size // 2)
        return [make_example(kind, sizes, rng) for kind in kinds]
    served = rng.choice(rng.choices((SMALL, MIDDLE, LARGE), stage.sizes)[0])
    other = served if rng.random() < 0.6 else rng.choice(SMALL)
    patches = served[0] * served[1] // 256
    count = min(stage.batch_size, max(8, PATCHES_A_STEP // patches))
    kinds = rng.choices(list(stage.kinds), list(stage.kinds.values()), k=count)
    turn_count = rng.choice((1, 2, 3))  # one for all: rows of like length waste little padding
    return [
        make_example(kind, _pair(served, other, rng), rng, stage.most_marks, turn_count) for kind in kinds
    ]


def _pair(first: scenes.Size, second: scenes.Size, rng: random.Random) -> tuple[scenes.Size, scenes.Size]:
    return native_size(first, rng), native_size(second, rng)


def _native(served: tuple[scenes.Size, ...], rng: random.Random) -> scenes.Size:
    return native_size(rng.choice(served), rng)


def held_out(kind: str, index: int, seed: int) -> Example:
    """One example that no training step has seen: its random stream has another name.

    Half of the pictures are small, three in ten middle-sized, two in ten large; clips are small.
    """
    rng = random.Random(f"held out/{seed}/{kind}/{index}")
    shares = (1, 0, 0) if kind in CLIP_KINDS else (5, 3, 2)
    first, second = (_native(rng.choices((SMALL, MIDDLE, LARGE), shares)[0], rng) for _ in range(2))
    return make_example(kind, (first, second), rng)
