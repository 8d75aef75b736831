"""What narrower stored features cost: how many answers change, and how far rows of features turn.

Held-out questions about generated pictures are answered greedily with the real tower, codec, prompts and
engine in one process, float32 on the CPU: once from features as the tower gave them, then from the same
features stored as bfloat16 and as fp8.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from bench.in_process import InProcessDecoder, Question
from demo.asking import as_conversation
from demo.curriculum import CLIP_KINDS
from demo.evaluate import exam
from demo.pair import DEMO_CHECKPOINT
from demo.questions import KINDS, Example
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.tower import Patches
from encoder_service.vision_model import VisionModel
from shared.checkpoint import Checkpoint, Placement, open_checkpoint
from shared.features.bundle import FeatureBundle
from shared.features.manifest import StoreDtype

PICTURE_KINDS = tuple(kind for kind in KINDS if kind not in CLIP_KINDS and kind != "text only")
NARROWER: tuple[StoreDtype, ...] = ("bfloat16", "fp8")
PICTURES_A_PASS = 32


@dataclass(frozen=True, slots=True)
class Loss:
    """What one stored dtype changes.

    `changed` answers differ from those of the model's own dtype; of these, `wrong_before` were not the
    expected answer and `wrong_after` are not. The cosines, one for each level (main features first),
    are those between a row as it was and as it was read.
    """

    changed: int
    wrong_before: int
    wrong_after: int
    mean_cosines: tuple[float, ...]
    min_cosines: tuple[float, ...]


def measure(checkpoint: Path = DEMO_CHECKPOINT, *, per_kind: int = 100, seed: int = 2000) -> dict[str, float]:
    """Asks `per_kind` questions of each kind; the losses as one flat dictionary of figures."""
    disable_progress_bar()  # of Transformers, which shows one wherever it runs
    count, losses = _measure(open_checkpoint(str(checkpoint)), per_kind, seed)
    figures: dict[str, float] = {"answers": count}
    for dtype, loss in losses.items():
        figures |= {
            f"{dtype}_changed_answers": loss.changed,
            f"{dtype}_changed_wrong_before": loss.wrong_before,
            f"{dtype}_changed_wrong_after": loss.wrong_after,
            f"{dtype}_min_cosine": min(loss.min_cosines),
        }
        for level, (mean, least) in enumerate(zip(loss.mean_cosines, loss.min_cosines, strict=True)):
            figures |= {
                f"{dtype}_level_{level}_mean_cosine": mean,
                f"{dtype}_level_{level}_min_cosine": least,
            }
    return figures


def _measure(checkpoint: Checkpoint, per_kind: int, seed: int) -> tuple[int, dict[StoreDtype, Loss]]:
    examples = [exam(kind, index, seed) for kind in PICTURE_KINDS for index in range(per_kind)]
    questions = list(_questions(checkpoint, examples))
    truths = [example.turns[-1][1] for example in examples]
    decoder = InProcessDecoder.open(checkpoint)
    plain = asyncio.run(decoder.answer_all(questions, "model"))
    losses = {}
    for dtype in NARROWER:
        answered = asyncio.run(decoder.answer_all(questions, dtype))
        cosines = [_cosines(*pair) for pair in zip(plain.features, answered.features, strict=True)]
        losses[dtype] = _loss(truths, plain.texts, answered.texts, torch.cat(cosines))
    return len(questions), losses


def _questions(checkpoint: Checkpoint, examples: Sequence[Example]) -> Iterator[Question]:
    """The examples with the features of their pictures, as the tower gives them."""
    preprocessor = ImagePreprocessor.open(checkpoint.path)
    patches = [
        preprocessor.patches(image)
        for example in tqdm(examples, desc="pictures", leave=False, disable=None)
        for image in as_conversation(example).images
    ]
    features = _features(checkpoint, patches)
    for example in examples:
        pictures = tuple(next(features) for _ in example.pictures)
        yield Question(example.turns, pictures, example.system)


def _features(checkpoint: Checkpoint, patches: Sequence[Patches]) -> Iterator[FeatureBundle]:
    tower = VisionModel.open(checkpoint, Placement("cpu", "float32"))
    starts = range(0, len(patches), PICTURES_A_PASS)
    for start in tqdm(starts, desc="tower", leave=False, disable=None):
        yield from tower.encode(patches[start : start + PICTURES_A_PASS])


def _cosines(before: FeatureBundle, after: FeatureBundle) -> torch.Tensor:
    """`[token_count, levels]`."""
    pairs = zip(before.levels(), after.levels(), strict=True)
    return torch.stack([cosine_similarity(a.double(), b.double(), dim=-1) for a, b in pairs], dim=-1)


def _loss(truths: Sequence[str], before: Sequence[str], after: Sequence[str], cosines: torch.Tensor) -> Loss:
    changed = [each for each in zip(truths, before, after, strict=True) if each[1] != each[2]]
    return Loss(
        changed=len(changed),
        wrong_before=sum(was != truth for truth, was, _ in changed),
        wrong_after=sum(now != truth for truth, _, now in changed),
        mean_cosines=tuple(cosines.mean(dim=0).tolist()),
        min_cosines=tuple(cosines.min(dim=0).values.tolist()),
    )


def report(figures: Mapping[str, float]) -> str:
    """The figures of `measure` as lines of text."""
    lines = [f"{figures['answers']} answers"]
    for dtype in NARROWER:
        lines.append(
            f"{dtype}: {figures[f'{dtype}_changed_answers']} changed; of these were wrong before "
            f"{figures[f'{dtype}_changed_wrong_before']}, and are wrong now "
            f"{figures[f'{dtype}_changed_wrong_after']}"
        )
        level = 0
        while f"{dtype}_level_{level}_mean_cosine" in figures:
            mean, least = (figures[f"{dtype}_level_{level}_{name}_cosine"] for name in ("mean", "min"))
            name = "main" if level == 0 else f"DeepStack {level - 1}"
            lines.append(f"  {name}: cosine of a row {mean:.6f} on average, {least:.6f} at the least")
            level += 1
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="directory to measure")
    parser.add_argument("--per-kind", type=int, default=100, help="questions of each kind (default: 100)")
    parser.add_argument("--seed", type=int, default=2000, help="which held-out pictures (default: 2000)")
    arguments = parser.parse_args()
    print(report(measure(arguments.checkpoint, per_kind=arguments.per_kind, seed=arguments.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
