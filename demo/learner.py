"""Owns what is trained and its losses; knows nothing of stages, schedules or files."""

from __future__ import annotations

import re
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from demo.batches import (
    HUES,
    IGNORED,
    WHATS,
    Batch,
    Group,
    in_reading_order,
    labels_in_reading_order,
    look_at,
)
from demo.fast import FastTower, Sight, answer_logits
from demo.model import demo_config
from demo.pointing import Pointer

_SCALE = re.compile(r"visual\.(merger|deepstack_merger_list\.\d+)\.linear_fc2\.")

_QUIET_LEVELS = 0.01
_POINTING = 0.3


class Learner(nn.Module):
    """The model, and throw-away heads that name the thing, the colour and the place in the picture
    of each merged patch.

    From scratch, and through the language half alone, the tower does not learn shapes.
    """

    def __init__(self, core: Tokenizer) -> None:
        super().__init__()
        self.model = Qwen3VLForConditionalGeneration(demo_config(core)).float()
        width = self.model.config.vision_config.out_hidden_size
        self.head = nn.Linear(width, len(WHATS) + len(HUES))
        # Fixed and faint, so that the place must be told loudly: else the language half overhears it.
        self.where = nn.Linear(width, 2).requires_grad_(False)
        nn.init.orthogonal_(self.where.weight, gain=0.3)
        _set_first_weights(self.model)
        self.pointer = Pointer(core, self.model.model.language_model)
        self.tower = FastTower(self.model.model.visual)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters; those that set the scale of the visual tokens learn more slowly.

        At the full rate the DeepStack levels grow to fifty times the length of a word's vector, and
        then nothing that the language half adds to a visual token is heard any more.
        """
        scale = {id(p) for name, p in self.named_parameters() if _SCALE.search(name)}
        others = [p for p in self.parameters() if id(p) not in scale]
        slow = [p for p in self.parameters() if id(p) in scale]
        return [{"params": others, "share": 1.0}, {"params": slow, "share": 0.1}]

    def loss(self, batch: Batch, sight_weight: float, *, answers: bool) -> torch.Tensor:
        sights = look_at(self.tower, batch.groups, levels=answers)
        loss = torch.zeros(())
        if sights:
            seen = self._sight_loss(batch.groups, sights) + self._place_loss(batch.groups, sights)
            loss = sight_weight * seen + _QUIET_LEVELS * _loudness(sights)
        if answers:
            loss = loss + functional.cross_entropy(*self._answers(batch, sights))
            loss = loss + (_POINTING * self._pointing_loss(batch) if sights else 0)
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

    def _pointing_loss(self, batch: Batch) -> torch.Tensor:
        config = self.model.config
        visual = (batch.ids == config.image_token_id) | (batch.ids == config.video_token_id)
        labels = labels_in_reading_order(batch.groups)
        return self.pointer.loss(batch.ids, batch.labels != IGNORED, visual, *labels)

    def _place_loss(self, groups: list[Group], sights: list[Sight]) -> torch.Tensor:
        told = torch.cat([self.where(sight.main).flatten(0, 1) for sight in sights])
        true = torch.cat([group.places.flatten(0, 1) for group in groups])
        seen = torch.cat([group.whats.flatten() for group in groups])
        weights = torch.where(seen == IGNORED, 0.0, torch.where(seen > 0, 2.0, 0.5))
        return (weights[:, None] * (told - true).square()).mean()


def _loudness(sights: list[Sight]) -> torch.Tensor:
    """Mean square of what DeepStack adds to the visual tokens, over levels and tokens."""
    squares = [level.square().mean() for sight in sights for level in sight.levels]
    return torch.stack(squares).mean() if squares else torch.zeros(())


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
            share = 0.2 if _SCALE.search(f"{name}.") else share
            nn.init.normal_(module.weight, std=share * module.in_features**-0.5)
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    nn.init.normal_(model.model.visual.patch_embed.proj.weight, std=0.02)
