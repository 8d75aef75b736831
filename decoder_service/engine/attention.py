"""Attention over a packed row: each sequence to its own past; knows no requests and no scheduling.

What all layers have in common is planned once for a step (`plan_step`); `attend` then runs in each layer.
Sequences with a few new rows, those that decode above all, look at their past together: of a group of as
many rows each and about the same length all tokens are gathered in one go, padded to the longest. A prompt
without a past looks at the rows of the step itself, a longer one with a past at its own gathered tokens.
Everything a step writes to the cache is written before anyone looks.

Padding is masked, and yet it must hold a sequence's own numbers: a weight of zero does not silence a NaN, and
a slot that is not the sequence's may hold one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from decoder_service.engine.kv_cache import BLOCK_TOKENS
from decoder_service.engine.kv_pool import KVPool

# New rows that a sequence of a group may have: with more, it keeps the processor busy alone.
_FEW_ROWS = 32
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
    def rows(self) -> int:
        return self.end - self.begin

    @property
    def past(self) -> int:
        return self.length - self.rows


@dataclass(frozen=True, slots=True)
class _Group:
    """`count` sequences with as many rows each. `slots` `[count * longest]` are all of theirs, padded;
    `mask` `[count, 1, rows of each, longest]` is added to the scores, None when everyone sees everything.
    """

    count: int
    rows: slice | torch.Tensor
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
    groups: tuple[_Group, ...]
    prompts: tuple[tuple[_PromptPart, torch.Tensor | None], ...]


def plan_step(pool: KVPool, sequences: Sequence[PackedSequence]) -> PackedPlan:
    """The plan of a step with these sequences, in the order of their rows."""
    short = [each for each in sequences if each.rows <= _FEW_ROWS and each.past > 0]
    prompts = [each for each in sequences if each.rows > _FEW_ROWS or each.past == 0]
    return PackedPlan(
        pool,
        torch.cat([_slots(each, each.past, each.length) for each in sequences]),
        tuple(_group(members, pool.shape.dtype) for members in _memberships(short, pool)),
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
    for group in plan.groups:
        cached = plan.pool.gather(layer, group.slots)
        output[group.rows] = _look_together(cached, group, query[group.rows], scaling)
    for part, kept_mask in plan.prompts:
        rows = slice(part.begin, part.end)
        if part.slots is None:
            output[rows] = _prefill(query[rows], key[rows], value[rows], None, scaling)
        else:
            cached = plan.pool.gather(layer, part.slots)
            mask = part.mask(query.dtype) if kept_mask is None else kept_mask
            output[rows] = _prefill(query[rows], cached[:, 0], cached[:, 1], mask, scaling)
    return output


def _look_together(cached: torch.Tensor, group: _Group, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """`query` `[rows, heads, head_dim]` are the rows of the group's sequences, one after the other."""
    rows, heads, head_dim = query.shape
    cached = cached.view(group.count, -1, *cached.shape[1:])
    keys, values = cached[:, :, 0].transpose(1, 2), cached[:, :, 1].transpose(1, 2)
    kv_heads, each = keys.shape[1], rows // group.count
    # The heads that share a key are like rows that see the same past: nothing is repeated.
    shared = (group.count, each, kv_heads, heads // kv_heads, head_dim)
    grouped = query.view(shared).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = group.mask if each == 1 or group.mask is None else group.mask.repeat(1, 1, heads // kv_heads, 1)
    attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    by_row = attended.view(group.count, kv_heads, -1, each, head_dim).permute(0, 3, 1, 2, 4)
    return by_row.reshape(rows, heads, head_dim)


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


def _memberships(sequences: Sequence[PackedSequence], pool: KVPool) -> Iterator[list[PackedSequence]]:
    """Sequences of as many rows and about the same length, in the order of their rows."""
    most_tokens = _GROUP_BYTES // pool.shape.row_bytes
    members: list[PackedSequence] = []
    for sequence in sorted(sequences, key=lambda each: (each.rows, -each.length)):
        if members:
            longest = members[0].length
            is_like = sequence.rows == members[0].rows and sequence.length >= _SHORTEST * longest
            if not is_like or (len(members) + 1) * longest > most_tokens:
                yield sorted(members, key=lambda each: each.begin)
                members = []
        members.append(sequence)
    if members:
        yield sorted(members, key=lambda each: each.begin)


def _group(members: Sequence[PackedSequence], dtype: torch.dtype) -> _Group:
    device = members[0].blocks.device
    lengths = [sequence.length for sequence in members]
    slots = torch.empty(len(members), max(lengths), dtype=torch.long, device=device)
    for padded, sequence in zip(slots, members, strict=True):
        padded[: sequence.length] = _slots(sequence, 0, sequence.length)
        padded[sequence.length :] = padded[0]
    mask = _group_mask(lengths, members[0].rows, dtype, device)
    return _Group(len(members), _rows(members), slots.view(-1), mask)


def _rows(members: Sequence[PackedSequence]) -> slice | torch.Tensor:
    """A slice where the members stand side by side, for what a slice takes is not copied."""
    begin, end = members[0].begin, members[-1].end
    if end - begin == len(members) * members[0].rows:
        return slice(begin, end)
    rows = [row for sequence in members for row in range(sequence.begin, sequence.end)]
    return torch.tensor(rows, device=members[0].blocks.device)


def _group_mask(
    lengths: Sequence[int], rows: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Row i of `rows` sees all but the last `rows - 1 - i` tokens of its sequence, and no padding."""
    if rows == 1 and len(set(lengths)) == 1:
        return None
    ends = torch.tensor(lengths, device=device)[:, None] - torch.arange(rows - 1, -1, -1, device=device)
    is_hidden = torch.arange(max(lengths), device=device) >= ends[:, :, None]
    return torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, -torch.inf)[:, None]


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
