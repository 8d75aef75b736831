"""Attention over packed rows equals attention written down plainly, one row after the other."""

import random
from dataclasses import dataclass

import pytest
import torch

from decoder_service.engine.attention import PackedSequence, attend, plan_step
from decoder_service.engine.kv_cache import BLOCK_TOKENS, blocks_for
from decoder_service.engine.kv_pool import KVPool, KVShape

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CPU = torch.device("cpu")
SCALING = 0.4


@dataclass(frozen=True, slots=True)
class Part:
    """`rows` of a sequence, behind `past` tokens that are in the cache already."""

    past: int
    rows: int


class Cache:
    """A pool full of NaN but for what is written, and the same keys and values by sequence."""

    def __init__(self, parts: list[Part], seed: int = 0, num_blocks: int = 400) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shape = KVShape(1, KV_HEADS, HEAD_DIM, torch.float32)
        self.pool = KVPool(shape, num_blocks, CPU)
        everything = torch.arange(num_blocks * BLOCK_TOKENS)
        nothing = torch.full((len(everything), KV_HEADS, HEAD_DIM), torch.nan)
        self.pool.write(0, everything, nothing, nothing)
        free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.sequences, self.keys, self.values = [], [], []
        row = 0
        for part in parts:
            length = part.past + part.rows
            blocks = torch.tensor([free.pop() for _ in range(blocks_for(length))])
            self.sequences.append(PackedSequence(row, row + part.rows, length, blocks))
            self.keys.append(self.random(length, KV_HEADS))
            self.values.append(self.random(length, KV_HEADS))
            self.write(blocks, self.keys[-1][: part.past], self.values[-1][: part.past])
            row += part.rows

    def random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, HEAD_DIM, generator=self.generator)

    def write(self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        places = torch.arange(len(keys))
        slots = blocks[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
        self.pool.write(0, slots, keys, values)

    def rows_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """What a step brings: the last rows of each sequence."""
        own = zip(self.sequences, tensors, strict=True)
        return torch.cat([tensor[sequence.past :] for sequence, tensor in own])


def plainly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int) -> torch.Tensor:
    """Row by row and head by head, in float64."""
    output = torch.empty_like(query)
    for row in range(len(query)):
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            seen = slice(0, past + row + 1)
            scores = keys[seen, shared].double() @ query[row, head].double() * SCALING
            output[row, head] = scores.softmax(0) @ values[seen, shared].double()
    return output


def check(cache: Cache) -> None:
    query = cache.random(cache.sequences[-1].end, HEADS)
    plan = plan_step(cache.pool, cache.sequences)
    attended = attend(plan, 0, query, cache.rows_of(cache.keys), cache.rows_of(cache.values), scaling=SCALING)
    for sequence, keys, values in zip(cache.sequences, cache.keys, cache.values, strict=True):
        rows = slice(sequence.begin, sequence.end)
        expected = plainly(query[rows], keys, values, sequence.past)
        assert torch.allclose(attended[rows], expected, atol=1e-5)


@pytest.mark.parametrize(
    "parts",
    [
        [Part(0, 1)],
        [Part(0, 40)],
        [Part(1, 1)],
        [Part(15, 1), Part(16, 1), Part(17, 1)],
        [Part(31, 1)] * 4,
        [Part(300, 1), Part(290, 1), Part(20, 1), Part(19, 1), Part(3, 1)],
        [Part(7, 1), Part(0, 33), Part(16, 16), Part(5, 2)],
        [Part(64, 14)] * 4,
        [Part(64, 14), Part(60, 14), Part(8, 14), Part(80, 32), Part(80, 33), Part(81, 33)],
        [Part(20, 3), Part(9, 1), Part(19, 3), Part(10, 1), Part(18, 3)],
    ],
    ids=str,
)
def test_a_step_of_these_parts(parts: list[Part]) -> None:
    check(Cache(parts))


@pytest.mark.parametrize("seed", range(20))
def test_steps_at_random(seed: int) -> None:
    rng = random.Random(seed)
    decoding = [Part(rng.randint(1, 200), 1) for _ in range(rng.randint(0, 12))]
    prompts = [Part(rng.choice([0, 0, rng.randint(1, 90)]), rng.randint(1, 60)) for _ in range(4)]
    check(Cache([*decoding, *prompts], seed))


def test_a_long_prompt_behind_a_long_past_is_looked_at_a_few_rows_at_a_time() -> None:
    cache = Cache([Part(3000, 1500)])
    query = cache.random(1500, HEADS)
    plan = plan_step(cache.pool, cache.sequences)
    assert len(plan.prompts) > 1
    attended = attend(plan, 0, query, cache.rows_of(cache.keys), cache.rows_of(cache.values), scaling=SCALING)
    for row in (0, 700, 1499):
        expected = plainly(query[row : row + 1], cache.keys[0], cache.values[0], 3000 + row)
        assert torch.allclose(attended[row], expected[0], atol=1e-5)


def test_a_sequence_sees_what_another_one_writes_in_the_same_step() -> None:
    """Two prompts that share two blocks, which the first one fills in this very step."""
    cache = Cache([Part(0, 40), Part(0, 45)])
    first, second = cache.sequences
    shared = torch.cat([first.blocks[:2], second.blocks[2:]])
    cache.sequences[1] = PackedSequence(40, 53, 45, shared)
    for tensors in (cache.keys, cache.values):
        tensors[1][:32] = tensors[0][:32]
    check(cache)


def test_sequences_that_share_their_past_look_at_it_together() -> None:
    cache = Cache([Part(64, 1)] * 6)
    for number, sequence in enumerate(cache.sequences[1:], start=1):
        blocks = torch.cat([cache.sequences[0].blocks[:4], sequence.blocks[4:]])
        cache.sequences[number] = PackedSequence(sequence.begin, sequence.end, 65, blocks)
        cache.keys[number][:64], cache.values[number][:64] = cache.keys[0][:64], cache.values[0][:64]
    check(cache)
