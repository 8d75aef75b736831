"""Attention over a packed row: each sequence to its own past; knows no requests and no scheduling.

What all layers have in common is planned once for a step (`plan_step`); `attend` then runs in each layer.
Sequences that decode look at their past together: of a group of about the same length all rows are gathered
in one go, padded to the longest. A prompt without a past looks at the rows of the step itself, one with a
past at its gathered ones. Everything a step writes to the cache is written before anyone looks.

Padding is masked, and yet it must hold a sequence's own numbers: a weight of zero does not silence a NaN, and
a slot that is not the sequence's may hold one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from decoder_service.engine.kv_cache import BLOCK_TOKENS
from decoder_service.engine.kv_pool import KVPool

# A group is padded to its longest: none is shorter than this share of it.
_SHORTEST = 0.75
# Gathered memory of one group, if it is more than one sequence, and places of one mask.
_GROUP_BYTES = 64 * 2**20
_MASK_PLACES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence's part of a packed row: the rows `[begin, end)` are the last of its `length` tokens,
    which lie in `blocks`.
    """

    begin: int
    end: int
    length: int
    blocks: torch.Tensor

    @property
    def past(self) -> int:
        return self.length - (self.end - self.begin)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one row each. `slots` `[sequences * longest]` are all of theirs, padded;
    `mask` `[sequences, 1, 1, longest]` is added to the scores, None when all are of one length.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """Rows `[begin, end)` of one sequence that look at the tokens in `slots`, the last of them their own.

    `slots` is None where these are the rows themselves.
    """

    begin: int
    end: int
    slots: torch.Tensor | None

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """`[rows, slots]`, added to the scores: 0 where a row may look, else minus infinity."""
        assert self.slots is not None
        rows, length = self.end - self.begin, len(self.slots)
        hidden = torch.full((rows, length), -torch.inf, dtype=dtype, device=self.slots.device)
        return hidden.triu_(length - rows + 1)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What attention needs to know of one step. `write_slots` `[N]` is where each row's key belongs."""

    pool: KVPool
    write_slots: torch.Tensor
    decoding: tuple[_DecodeGroup, ...]
    prompts: tuple[tuple[_PromptPart, torch.Tensor | None], ...]


def plan_step(pool: KVPool, sequences: Sequence[PackedSequence]) -> PackedPlan:
    """The plan of a step with these sequences, in the order of their rows."""
    decoding = [each for each in sequences if each.end - each.begin == 1 and each.past > 0]
    prompts = [each for each in sequences if each.end - each.begin > 1 or each.past == 0]
    return PackedPlan(
        pool,
        torch.cat([_slots(each, each.past, each.length) for each in sequences]),
        tuple(_decode_group(group, pool.shape.dtype) for group in _groups(decoding, pool)),
        tuple((part, _shared_mask(part, pool.shape.dtype)) for each in prompts for part in _parts(each)),
    )


def attend(
    plan: PackedPlan,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
) -> torch.Tensor:
    """Stores the row's keys and values, then lets each sequence look at its own.

    `query` is `[N, heads, head_dim]`, `key` and `value` `[N, kv_heads, head_dim]`; so is the result like
    `query`.
    """
    plan.pool.write(layer, plan.write_slots, key, value)
    output = torch.empty_like(query)
    for group in plan.decoding:
        output[group.rows] = _decode(plan.pool.gather(layer, group.slots), group, query[group.rows], scaling)
    for part, kept_mask in plan.prompts:
        rows = slice(part.begin, part.end)
        if part.slots is None:
            output[rows] = _prefill(query[rows], key[rows], value[rows], None, scaling)
        else:
            cached = plan.pool.gather(layer, part.slots)
            mask = part.mask(query.dtype) if kept_mask is None else kept_mask
            output[rows] = _prefill(query[rows], cached[:, 0], cached[:, 1], mask, scaling)
    return output


def _decode(cached: torch.Tensor, group: _DecodeGroup, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """`query` `[sequences, heads, head_dim]`, one row for each sequence of the group."""
    count, heads, head_dim = query.shape
    cached = cached.view(count, -1, *cached.shape[1:])
    keys, values = cached[:, :, 0].transpose(1, 2), cached[:, :, 1].transpose(1, 2)
    # The heads that share a key are like rows that see the same past: nothing is repeated.
    grouped = query.view(count, keys.shape[1], -1, head_dim)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=scaling)
    return attended.reshape(count, heads, head_dim)


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """`[rows, heads, head_dim]` looks at `[length, kv_heads, head_dim]`; plainly causal without a mask."""
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _slots(sequence: PackedSequence, start: int, end: int) -> torch.Tensor:
    """Where the tokens `[start, end)` of a sequence lie: the contract of kv_cache.py."""
    places = torch.arange(start, end, device=sequence.blocks.device)
    return sequence.blocks[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS


def _groups(sequences: Sequence[PackedSequence], pool: KVPool) -> Iterator[list[PackedSequence]]:
    """Sequences of about the same length, the longest first."""
    most_tokens = _GROUP_BYTES // pool.shape.row_bytes
    group: list[PackedSequence] = []
    for sequence in sorted(sequences, key=lambda each: -each.length):
        if group:
            longest = group[0].length
            if sequence.length < _SHORTEST * longest or (len(group) + 1) * longest > most_tokens:
                yield group
                group = []
        group.append(sequence)
    if group:
        yield group


def _decode_group(group: Sequence[PackedSequence], dtype: torch.dtype) -> _DecodeGroup:
    device = group[0].blocks.device
    slots = torch.empty(len(group), group[0].length, dtype=torch.long, device=device)
    for padded, sequence in zip(slots, group, strict=True):
        padded[: sequence.length] = _slots(sequence, 0, sequence.length)
        padded[sequence.length :] = padded[0]
    lengths = [sequence.length for sequence in group]
    rows = torch.tensor([sequence.begin for sequence in group], device=device)
    return _DecodeGroup(rows, slots.view(-1), _padding_mask(lengths, dtype, device))


def _padding_mask(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    if len(set(lengths)) == 1:
        return None
    is_padding = torch.arange(lengths[0], device=device) >= torch.tensor(lengths, device=device)[:, None]
    return torch.zeros_like(is_padding, dtype=dtype).masked_fill_(is_padding, -torch.inf)[:, None, None]


def _parts(sequence: PackedSequence) -> Iterator[_PromptPart]:
    """The rows of a prompt; with a long past a few at a time, so that no mask is too large."""
    if sequence.past == 0:
        yield _PromptPart(sequence.begin, sequence.end, None)
        return
    at_once = max(1, _MASK_PLACES // sequence.length)
    for begin in range(sequence.begin, sequence.end, at_once):
        end = min(begin + at_once, sequence.end)
        length = sequence.length - (sequence.end - end)
        yield _PromptPart(begin, end, _slots(sequence, 0, length))


def _shared_mask(part: _PromptPart, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask for all layers, if it is small enough to be kept for the whole step."""
    if part.slots is None or (part.end - part.begin) * len(part.slots) > _MASK_PLACES // 4:
        return None
    return part.mask(dtype)
