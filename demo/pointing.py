"""Owns the training-only lesson of where to look: a name must point at what it names.

At each shape's name in the text one attention head of one text layer is told which visual tokens
show it; where an answer begins, one of the next layer is told the same about the last name in the
question. Left alone, the language half soon finds things by their colour and hardly ever by their
shape. Knows nothing of batches or schedules; the model itself stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from demo.pictures import COLOURS, SHAPES

NAME_LAYER, ANSWER_LAYER = 1, 2
HEAD = 0
_NAME = "demo_pointing"


class Pointer:
    """Watches the queries and keys of one layer of a text model while it trains."""

    def __init__(self, core: Tokenizer, text: Any) -> None:
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shapes = _words(core, {shape: index + 1 for index, shape in enumerate(SHAPES)})
        self._colours = _words(core, {colour: index + 1 for index, colour in enumerate(COLOURS)})
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, _no_mask)
        text.config._attn_implementation = _NAME

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        if module.layer_idx in (NAME_LAYER, ANSWER_LAYER):
            groups = query.shape[1] // key.shape[1]
            self._seen[module.layer_idx] = (query[:, HEAD] * scaling, key[:, HEAD // groups])
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2).contiguous(), None

    def loss(
        self,
        ids: torch.Tensor,
        answering: torch.Tensor,
        visual: torch.Tensor,
        whats: torch.Tensor,
        hues: torch.Tensor,
    ) -> torch.Tensor:
        """How much of the heads' attention to visual tokens misses what the names mean.

        `ids`, `answering` (where the next token belongs to an answer) and `visual` are
        `[batch, length]`; `whats` and `hues` label the visual tokens in reading order. A colour's
        name right before that of a shape counts.
        """
        shape, colour = self._shapes[ids], self._colours[ids].roll(1, dims=1)
        names = (shape > 0).nonzero()
        starts = _answer_starts(shape > 0, answering)
        shown, hue = _spread(visual, whats), _spread(visual, hues)
        total = torch.zeros(())
        # A name points from where it stands; an answer begins by looking at what was named last.
        for layer, (rows, places, named) in (
            (NAME_LAYER, (*names.unbind(1), names[:, 1])),
            (ANSWER_LAYER, starts.unbind(1)),
        ):
            wanted_hue = colour[rows, named][:, None]
            right = shown[rows] == shape[rows, named][:, None]
            right &= (wanted_hue == 0) | (hue[rows] == wanted_hue)
            total = total + self._miss(layer, rows, places, visual[rows], right)
        return total

    def _miss(
        self,
        layer: int,
        rows: torch.Tensor,
        places: torch.Tensor,
        visual: torch.Tensor,
        right: torch.Tensor,
    ) -> torch.Tensor:
        queries, keys = self._seen[layer]
        scores = (queries[rows, places][:, None] * keys[rows]).sum(-1)
        scores = scores.masked_fill(~visual, float("-inf"))
        useful = right.any(dim=1)
        if not bool(useful.any()):
            return scores.new_zeros(())
        scores, right = scores[useful], right[useful]
        hit = scores.masked_fill(~right, float("-inf")).logsumexp(dim=1)
        return (scores.logsumexp(dim=1) - hit).mean()


def _answer_starts(named: torch.Tensor, answering: torch.Tensor) -> torch.Tensor:
    """Rows `(row, place, name)`: the place before each answer's first token, and the last name in
    the question before it; questions without a name are left out."""
    found = []
    for row in range(len(named)):
        name = None
        for place in range(1, named.shape[1]):
            if answering[row, place] and not answering[row, place - 1]:
                if name is not None:
                    found.append((row, place, name))
                name = None
            elif named[row, place] and not answering[row, place]:
                name = place
    return torch.tensor(found, dtype=torch.long).view(-1, 3)


def _spread(visual: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels of the visual tokens at their places in the text, -1 elsewhere."""
    spread = torch.full(visual.shape, -1)
    spread[visual] = labels
    return spread


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _words(core: Tokenizer, names: dict[str, int]) -> torch.Tensor:
    """For each token id the number of the name that it spells, or zero."""
    numbers = torch.zeros(64 * -(-core.get_vocab_size() // 64), dtype=torch.long)
    for name, number in names.items():
        for spelling in (name, f" {name}", f" {name}s", f" {name}es"):
            ids = core.encode(spelling).ids
            if len(ids) == 1:
                numbers[ids[0]] = number
    return numbers
