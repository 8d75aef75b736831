"""Attention over a packed row: each sequence to its own past; knows no requests and no scheduling.

Transformers calls `packed_attention` in every layer with the queries, keys and values of the whole row.
The plan of the step comes along as the keyword argument `packed` of the model's forward, so nothing here
is global but the registration of the name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from decoder_service.engine.kv_pool import KVPool

PACKED_ATTENTION = "lenspair_packed"


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence's part of a packed row.

    Its tokens in this step are the rows `[begin, end)`; they are the last ones of the tokens whose slots
    are `slots`, its whole past and themselves. `mask` `[rows, slots]` is True where a row may look; None
    where that needs no mask: one row looks everywhere, a row without a past is plainly causal.
    """

    begin: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What attention needs to know of one step. `write_slots` `[N]` is where each row's key belongs."""

    pool: KVPool
    write_slots: torch.Tensor
    sequences: tuple[PackedSequence, ...]


def plan_sequence(begin: int, end: int, slots: torch.Tensor) -> PackedSequence:
    """The part of a sequence that has the rows `[begin, end)`, and `slots` up to its last one."""
    rows = end - begin
    past = slots.shape[0] - rows
    mask = None
    if rows > 1 and past > 0:
        mask = torch.ones(rows, past + rows, dtype=torch.bool, device=slots.device).tril(past)
    return PackedSequence(begin, end, slots, mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PackedPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the row's keys and values, then lets each sequence look at its own.

    `query` is `[1, heads, N, head_dim]`, `key` and `value` `[1, kv_heads, N, head_dim]`; the result is
    `[1, N, heads, head_dim]`. The signature is that of Transformers' AttentionInterface.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    packed.pool.write(layer, packed.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    for sequence in packed.sequences:
        keys, values = packed.pool.gather(layer, sequence.slots)
        rows = query[0, :, sequence.begin : sequence.end]
        output[sequence.begin : sequence.end] = _attend(rows, keys, values, sequence.mask, scaling)
    return output[None], None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """`[heads, rows, head_dim]` looks at `[slots, kv_heads, head_dim]`; gives `[rows, heads, head_dim]`."""
    heads, rows, head_dim = query.shape
    key, value = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if rows == 1:
        # The heads that share a key are like rows that see the same past: nothing is repeated.
        grouped = query.reshape(1, keys.shape[1], -1, head_dim)
        return scaled_dot_product_attention(grouped, key, value, scale=scaling).reshape(1, heads, head_dim)
    attended = scaled_dot_product_attention(
        query[None], key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _no_mask(**_: Any) -> None:
    """Packed attention builds its own masks, a sequence at a time."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
