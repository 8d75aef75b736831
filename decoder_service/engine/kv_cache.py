"""Which blocks of the KV cache belong to whom; knows neither tensors nor who runs next.

The cache is a fixed number of *slots*, each room for the keys and values of one token in every layer.
Slots are lent in blocks of `BLOCK_TOKENS`, so that a sequence can lie anywhere and memory never
fragments: what is lost is at most the tail of a sequence's last block. Token number n of a sequence lives
in slot `block_table[n // BLOCK_TOKENS] * BLOCK_TOKENS + n % BLOCK_TOKENS`; this sentence is the whole
contract with the tensors (`kv_pool.py`), which see slots as rows and know no blocks.

A sequence gets all the blocks that it can ever need when it is admitted: prompt and longest answer. That
wastes room when answers end early, and buys a promise: what was admitted is never thrown out for want of
memory in the middle of its answer. The total is fixed at the start, from a setting, and nothing here is
sized by what a request asks for.

Blocks return to the end of the free list, so a block's old contents survive as long as possible.
"""

from collections import deque
from collections.abc import Iterable

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockManager:
    """Lends and takes back blocks of a cache of fixed size."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a cache needs at least one block, not {num_blocks}")
        self._num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._lent: set[int] = set()

    @property
    def total(self) -> int:
        return self._num_blocks

    @property
    def used(self) -> int:
        return len(self._lent)

    def can_allocate(self, tokens: int) -> bool:
        """True when the free blocks hold `tokens` tokens now."""
        return blocks_for(tokens) <= len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """A block table for `tokens` tokens; ask `can_allocate` first."""
        assert self.can_allocate(tokens)
        block_table = [self._free.popleft() for _ in range(blocks_for(tokens))]
        self._lent.update(block_table)
        return block_table

    def free(self, block_table: Iterable[int]) -> None:
        """Takes back the blocks of a sequence that has ended."""
        for block in block_table:
            self._lent.remove(block)
            self._free.append(block)
