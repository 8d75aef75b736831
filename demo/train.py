"""Owns the training run of the demo checkpoint; knows nothing of how pictures are drawn.

`python -m demo.train` goes through the stages of `demo.curriculum` from a fixed seed, saves a
snapshot every few minutes, goes on from the last one when started again, and writes the checkpoint
along the way. It wants about two hours on two CPU threads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported

import torch
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from demo.batches import Collator
from demo.curriculum import STAGES, Stage, held_out, step_examples
from demo.learner import Learner
from demo.model import write_configs, write_weights
from demo.questions import KINDS
from demo.snapshots import Progress, load_snapshot, save_snapshot
from demo.tokenizer import train_tokenizer

HERE = Path(__file__).parent
WARM_UP_STEPS = 100
SNAPSHOT_EVERY = 250
REPORT_EVERY = 500
REPORTED_OF_A_KIND = 24


def rate_at(stage: Stage, step: int) -> float:
    """A short climb, then half a cosine down to the stage's last share of its rate."""
    climb = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return stage.rate * climb * (stage.last_rate + (1 - stage.last_rate) * fall)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: what learns, what it is fed from, and where its results go."""

    learner: Learner
    collate: Collator
    optimizer: torch.optim.Optimizer
    checkpoint: Path
    scratch: Path
    seed: int

    def stage(self, index: int, first: int) -> None:
        """The steps of one stage from `first` on."""
        stage = STAGES[index]
        steps = range(first, stage.steps)
        bar = tqdm(steps, stage.name, initial=first, total=stage.steps, mininterval=10)
        mean = 0.0
        for step in bar:
            loss = self._step(index, step)
            mean = loss if mean == 0.0 else 0.98 * mean + 0.02 * loss
            bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
            if (step + 1) % SNAPSHOT_EVERY == 0:
                self._save(Progress(index, step + 1, self.seed))
            if stage.answers and (step + 1) % REPORT_EVERY == 0:
                bar.write(f"{stage.name} {step + 1}: {self._report()}")
                write_weights(self.learner.model, self.checkpoint)
        self._save(Progress(index + 1, 0, self.seed))
        write_weights(self.learner.model, self.checkpoint)

    def _step(self, index: int, step: int) -> float:
        stage = STAGES[index]
        batch = self.collate(step_examples(stage, index, step, self.seed))
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(stage, step) * group["share"]
        loss = self.learner.loss(batch, stage.sight_weight, answers=stage.answers)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def _save(self, progress: Progress) -> None:
        save_snapshot(self.scratch, self.learner, self.optimizer, progress)

    def _report(self) -> str:
        shares = {kind: self._accuracy(kind) for kind in KINDS}
        return "  ".join(f"{kind} {share:.0%}" for kind, share in shares.items())

    def _accuracy(self, kind: str) -> float:
        examples = [held_out(kind, index, self.seed + 1) for index in range(REPORTED_OF_A_KIND)]
        return self.learner.right_rows(self.collate(examples)) / len(examples)


def train(checkpoint: Path, scratch: Path, seed: int) -> None:
    torch.manual_seed(seed)
    core = _tokenizer(checkpoint, scratch, seed)
    write_configs(core, checkpoint)
    learner = Learner(core)
    optimizer = torch.optim.AdamW(
        learner.parameter_groups(), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    progress = load_snapshot(scratch, learner, optimizer) or Progress(0, 0, seed)
    if progress.seed != seed:
        sys.exit(f"the snapshot in {scratch} was made with seed {progress.seed}, not {seed}")
    run = Run(learner, Collator(core, learner.model), optimizer, checkpoint, scratch, seed)
    for index in range(progress.stage, len(STAGES)):
        run.stage(index, progress.step if index == progress.stage else 0)


def _tokenizer(checkpoint: Path, scratch: Path, seed: int) -> Tokenizer:
    """A run that goes on keeps the vocabulary that it began with."""
    if (scratch / "progress.json").exists():
        return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return train_tokenizer(seed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--scratch", type=Path, default=HERE / ".train", help="for snapshots")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.checkpoint, options.scratch, options.seed)


if __name__ == "__main__":
    main()
