"""Owns what is trained and its losses; knows nothing of stages, schedules or files."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from demo.batches import HUES, IGNORED, WHATS, Batch, Group, in_reading_order, look_at
from demo.fast import FastTower, Sight, answer_logits
from demo.model import demo_config


class Learner(nn.Module):
    """The model and a throw-away head that names the thing and the colour in each merged patch.

    From scratch, and through the language half alone, the tower does not learn shapes.
    """

    def __init__(self, core: Tokenizer) -> None:
        super().__init__()
        self.model = Qwen3VLForConditionalGeneration(demo_config(core)).float()
        width = self.model.config.vision_config.out_hidden_size
        self.head = nn.Linear(width, len(WHATS) + len(HUES))
        _set_first_weights(self.model)
        self.tower = FastTower(self.model.model.visual)

    def loss(self, batch: Batch, sight_weight: float, *, answers: bool) -> torch.Tensor:
        sights = look_at(self.tower, batch.groups)
        loss = torch.zeros(())
        if sights:
            loss = sight_weight * self._sight_loss(batch.groups, sights)
        if answers:
            loss = loss + functional.cross_entropy(*self._answers(batch, sights))
        return loss

    @torch.no_grad()
    def right_rows(self, batch: Batch) -> int:
        """How many rows are answered right at every place, as greedy decoding would."""
        logits, truth = self._answers(batch, look_at(self.tower, batch.groups))
        rows = (batch.labels != IGNORED).nonzero()[:, 0]
        wrong = set(rows[logits.argmax(-1) != truth].tolist())
        return len(batch.labels) - len(wrong)

    def _answers(self, batch: Batch, sights: list[Sight]) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = batch.labels != IGNORED
        sight = in_reading_order(batch.groups, sights)
        logits = answer_logits(self.model, batch.ids, batch.positions, sight, wanted)
        return logits, batch.labels[wanted]

    def _sight_loss(self, groups: list[Group], sights: list[Sight]) -> torch.Tensor:
        logits = torch.cat([self.head(sight.main).flatten(0, 1) for sight in sights])
        whats = torch.cat([group.whats.flatten() for group in groups])
        hues = torch.cat([group.hues.flatten() for group in groups])
        if not bool((whats != IGNORED).any()):
            return logits.sum() * 0
        by_what, by_hue = logits[:, : len(WHATS)], logits[:, len(WHATS) :]
        what_loss = functional.cross_entropy(by_what, whats, _quiet_background(len(WHATS)))
        hue_loss = functional.cross_entropy(by_hue, hues, _quiet_background(len(HUES)))
        return what_loss + 0.3 * hue_loss


def _quiet_background(class_count: int) -> torch.Tensor:
    """Class weights under which the many empty patches don't drown the few that hold something."""
    weights = torch.ones(class_count)
    weights[0] = 0.25
    return weights


def _set_first_weights(model: Qwen3VLForConditionalGeneration) -> None:
    """Matrices by their fan-in: at this width the usual 0.02 makes the tower learn much slower."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            into_the_sum = name.endswith(("linear_fc2", "attn.proj", "o_proj", "down_proj"))
            share = 0.5 if into_the_sum else 1.0
            nn.init.normal_(module.weight, std=share * module.in_features**-0.5)
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    nn.init.normal_(model.model.visual.patch_embed.proj.weight, std=0.02)
