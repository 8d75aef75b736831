"""Owns the training run of the demo checkpoint; knows nothing of how pictures are drawn.

`python -m demo.train` goes through the stages of `demo.curriculum` from a fixed seed, saves a
snapshot every few minutes, goes on from the last one when started again, and writes the checkpoint
at the end of each stage. It wants about two hours on two CPU threads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers import Qwen3VLForConditionalGeneration

from demo.batches import HUES, IGNORED, WHATS, Batch, Collator, Group, in_reading_order, look_at
from demo.curriculum import STAGES, Stage, held_out, step_examples
from demo.fast import FastTower, Sight, answer_logits
from demo.model import demo_config, write_configs, write_weights
from demo.questions import KINDS
from demo.snapshots import Progress, load_snapshot, save_snapshot
from demo.tokenizer import train_tokenizer

WARM_UP_STEPS = 100
HERE = Path(__file__).parent


class Learner(nn.Module):
    """The model and a throw-away head that names the thing and the colour in each merged patch."""

    def __init__(self, core: Tokenizer) -> None:
        super().__init__()
        self.model = Qwen3VLForConditionalGeneration(demo_config(core)).float()
        width = self.model.config.vision_config.out_hidden_size
        self.head = nn.Linear(width, len(WHATS) + len(HUES))
        set_first_weights(self.model)
        self.tower = FastTower(self.model.model.visual)

    def sight_loss(self, groups: list[Group], sights: list[Sight]) -> torch.Tensor:
        logits = torch.cat([self.head(sight.main).flatten(0, 1) for sight in sights])
        whats = torch.cat([group.whats.flatten() for group in groups])
        hues = torch.cat([group.hues.flatten() for group in groups])
        if not bool((whats != IGNORED).any()):
            return logits.sum() * 0
        by_what, by_hue = logits[:, : len(WHATS)], logits[:, len(WHATS) :]
        what_loss = functional.cross_entropy(by_what, whats, _quiet_background(len(WHATS)))
        hue_loss = functional.cross_entropy(by_hue, hues, _quiet_background(len(HUES)))
        return what_loss + 0.3 * hue_loss

    def answers(self, batch: Batch, sights: list[Sight]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and true tokens at every place of an answer, row by row."""
        wanted = batch.labels != IGNORED
        sight = in_reading_order(batch.groups, sights)
        logits = answer_logits(self.model, batch.ids, batch.positions, sight, wanted)
        return logits, batch.labels[wanted]

    def loss(self, batch: Batch, stage: Stage) -> torch.Tensor:
        sights = look_at(self.tower, batch.groups)
        loss = torch.zeros(())
        if sights:
            loss = stage.sight_weight * self.sight_loss(batch.groups, sights)
        if stage.answers:
            logits, labels = self.answers(batch, sights)
            loss = loss + functional.cross_entropy(logits, labels)
        return loss


def _quiet_background(class_count: int) -> torch.Tensor:
    """Class weights under which the many empty patches don't drown the few that hold something."""
    weights = torch.ones(class_count)
    weights[0] = 0.25
    return weights


def set_first_weights(model: Qwen3VLForConditionalGeneration) -> None:
    """Matrices by their fan-in: at this width the usual 0.02 makes the tower learn much slower."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            into_the_sum = name.endswith(("linear_fc2", "attn.proj", "o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=(0.5 if into_the_sum else 1) * module.in_features**-0.5)
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    nn.init.normal_(model.model.visual.patch_embed.proj.weight, std=0.02)


def rate_at(stage: Stage, step: int) -> float:
    """A short climb, then half a cosine down to the stage's last share of its rate."""
    climb = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return stage.rate * climb * (stage.last_rate + (1 - stage.last_rate) * fall)


@torch.no_grad()
def accuracy(learner: Learner, collate: Collator, kind: str, count: int, seed: int) -> float:
    """Share of held-out examples of which every answer is right under greedy decoding."""
    right = 0
    for start in range(0, count, 16):
        examples = [held_out(kind, index, seed) for index in range(start, min(start + 16, count))]
        batch = collate(examples)
        logits, labels = learner.answers(batch, look_at(learner.tower, batch.groups))
        rows = (batch.labels != IGNORED).nonzero()[:, 0]
        wrong = set(rows[logits.argmax(-1) != labels].tolist())
        right += len(examples) - len(wrong)
    return right / count


def report(learner: Learner, collate: Collator, count: int, seed: int) -> str:
    shares = {kind: accuracy(learner, collate, kind, count, seed) for kind in KINDS}
    return "  ".join(f"{kind} {share:.0%}" for kind, share in shares.items())


def train(checkpoint: Path, scratch: Path, seed: int) -> None:
    torch.manual_seed(seed)
    core = train_tokenizer(seed)
    write_configs(core, checkpoint)
    learner = Learner(core)
    collate = Collator(core, learner.model)
    optimizer = torch.optim.AdamW(learner.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    progress = load_snapshot(scratch, learner, optimizer) or Progress(0, 0, seed)
    if progress.seed != seed:
        sys.exit(f"the snapshot in {scratch} was made with seed {progress.seed}, not {seed}")
    for index in range(progress.stage, len(STAGES)):
        first = progress.step if index == progress.stage else 0
        _run_stage(index, first, learner, collate, optimizer, scratch, checkpoint, seed)


def _run_stage(
    index: int,
    first: int,
    learner: Learner,
    collate: Collator,
    optimizer: torch.optim.Optimizer,
    scratch: Path,
    checkpoint: Path,
    seed: int,
) -> None:
    stage = STAGES[index]
    bar = tqdm(range(first, stage.steps), stage.name, initial=first, total=stage.steps, mininterval=10)
    mean = 0.0
    for step in bar:
        loss = _step(stage, index, step, learner, collate, optimizer, seed)
        mean = loss if mean == 0.0 else 0.98 * mean + 0.02 * loss
        bar.set_postfix(loss=f"{mean:.4f}", refresh=False)
        if (step + 1) % 250 == 0 or step + 1 == stage.steps:
            done = step + 1 == stage.steps
            save_snapshot(
                scratch, learner, optimizer, Progress(index + done, 0 if done else step + 1, seed)
            )
        if stage.answers and (step + 1) % 500 == 0:
            bar.write(f"{stage.name} {step + 1}: {report(learner, collate, 32, seed + 1)}")
    write_weights(learner.model, checkpoint)


def _step(
    stage: Stage,
    index: int,
    step: int,
    learner: Learner,
    collate: Collator,
    optimizer: torch.optim.Optimizer,
    seed: int,
) -> float:
    batch = collate(step_examples(stage, index, step, seed))
    for group in optimizer.param_groups:
        group["lr"] = rate_at(stage, step)
    loss = learner.loss(batch, stage)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
    optimizer.step()
    return loss.item()


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
