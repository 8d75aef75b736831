"""Owns the training-only fast path through the unmodified modules; knows nothing of the data.

The weights and the results are those of Transformers' own forward pass. Two things make it quick on
a CPU: the patch convolution is a matrix product, and attention runs batched over pictures of equal
size instead of one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionModel,
    Qwen3VLVisionPatchMerger,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from demo.model import MERGE, PATCH


@dataclass(slots=True)
class Sight:
    """What the tower makes of n pictures: merged tokens `[n, tokens, D]`, once per level."""

    main: torch.Tensor
    levels: list[torch.Tensor]


class FastTower:
    """The vision tower over pictures of one size at a time."""

    def __init__(self, tower: Qwen3VLVisionModel) -> None:
        self._tower = tower
        self._places: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def look(self, patches: torch.Tensor, height: int, width: int, *, levels: bool) -> Sight:
        """Patches `[n, p, 1536]` of pictures of `height` x `width` pixels; or `[n, p, 768]` of
        one frame that stands for two equal ones, as it does for still pictures. Without `levels`
        the DeepStack levels are left out."""
        tower = self._tower
        taps, weights, cos, sin = self._place((height // PATCH, width // PATCH))
        projection = tower.patch_embed.proj
        weight = projection.weight.flatten(1)
        if patches.shape[-1] < weight.shape[1]:
            weight = projection.weight.sum(dim=2).flatten(1)
        hidden = functional.linear(patches, weight, projection.bias)
        hidden = hidden + (tower.pos_embed(taps) * weights[:, :, None]).sum(1)
        merged = []
        for index, block in enumerate(tower.blocks):
            hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
            hidden = hidden + block.mlp(block.norm2(hidden))
            if levels and index in tower.deepstack_visual_indexes:
                level = tower.deepstack_visual_indexes.index(index)
                merged.append(_merge(tower.deepstack_merger_list[level], hidden))
        return Sight(_merge(tower.merger, hidden), merged)

    def _place(self, grid: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        if grid not in self._places:
            tower = self._tower
            shape = torch.tensor([[1, *grid]])
            taps, weights = get_vision_interpolation_indices_and_weights(
                shape,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=MERGE,
            )
            positions = get_vision_position_ids(shape, MERGE)
            cos, sin = tower.rotary_pos_emb(weights, positions)
            self._places[grid] = (taps, weights, cos, sin)
        return self._places[grid]


def _merge(merger: Qwen3VLVisionPatchMerger, hidden: torch.Tensor) -> torch.Tensor:
    merged: torch.Tensor = merger(hidden.reshape(-1, hidden.shape[-1]))
    return merged.view(hidden.shape[0], -1, merged.shape[-1])


def _attend(
    attention: Qwen3VLVisionAttention, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    count, length, width = hidden.shape
    heads = attention.num_heads
    qkv = attention.qkv(hidden).view(count, length, 3, heads, width // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    query, key = _turn(query, cos, sin), _turn(key, cos, sin)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    result: torch.Tensor = attention.proj(mixed.transpose(1, 2).reshape(count, length, width))
    return result


def _turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def answer_logits(
    model: Qwen3VLForConditionalGeneration,
    ids: torch.Tensor,
    positions: torch.Tensor,
    sight: Sight | None,
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Logits of the token after each `wanted` place of right-padded rows `[batch, length]`.

    `sight` holds one row of all visual tokens in reading order; causal attention keeps the padding
    at the right away from everything that is asked for.
    """
    text = model.model.language_model
    embeds = text.embed_tokens(ids)
    visual: torch.Tensor | None = None
    levels: list[torch.Tensor] | None = None
    if sight is not None:
        config = model.config
        visual = (ids == config.image_token_id) | (ids == config.video_token_id)
        embeds = embeds.masked_scatter(visual[..., None], sight.main.to(embeds.dtype))
        levels = sight.levels
    hidden = text(
        inputs_embeds=embeds,
        position_ids=positions,
        attention_mask=None,
        use_cache=False,
        visual_pos_masks=visual,
        deepstack_visual_embeds=levels,
    ).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden[wanted])
    return logits
