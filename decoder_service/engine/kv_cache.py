"""Which blocks of the KV cache belong to whom, and what they hold; knows neither tensors nor who runs next.

The cache is a fixed number of *slots*, each room for the keys and values of one token in every layer.
Slots are lent in blocks of `BLOCK_TOKENS`, so that a sequence can lie anywhere and memory never
fragments: what is lost is at most the tail of a sequence's last block. Token number n of a sequence lives
in slot `block_table[n // BLOCK_TOKENS] * BLOCK_TOKENS + n % BLOCK_TOKENS`; this sentence is the whole
contract with the tensors (`kv_pool.py`), which see slots as rows and know no blocks.

A block is always in one of three states:

- *free*: nobody has it, and nobody knows what it holds;
- *lent*: in the block tables of as many sequences as it has references. Only the sequence that allocated it
  writes to it, and only to slots behind all that it has computed, so a full block never changes;
- *cached*: nobody has it, but its name (see prefix.py) says what it holds, and a sequence that begins with
  the same tokens and features may take it as it is.

Lent blocks can have a name as well: that is how live sequences share a prefix. When no block is free, the
cached one that was let go the longest time ago is taken and its name forgotten. A sequence lets go of its
last block first: the beginning of a prompt is worth more than its end, which is useless without it.
"""

from collections import deque
from collections.abc import Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockManager:
    """Lends, shares and takes back the blocks of a cache of fixed size."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a cache needs at least one block, not {num_blocks}")
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._cached: dict[int, None] = {}  # in the order in which they were let go
        self._name_of: dict[int, bytes] = {}
        self._block_named: dict[bytes, int] = {}
        self.num_evicted = 0

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def cached(self) -> int:
        """Blocks that nobody has, with contents that are known."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that are lent."""
        return self.total - self.available

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of `names`; lends none of them."""
        found: list[int] = []
        for name in names:
            block = self._block_named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def can_lend(self, found: Sequence[int], count: int, *, spare: int = 0) -> bool:
        """True when `share(found)` and `allocate(count)` leave `spare` blocks to allocate."""
        return count + sum(block in self._cached for block in found) + spare <= self.available

    def share(self, found: Sequence[int]) -> list[int]:
        """Lends the blocks of `find`, as they are, to one more sequence; the beginning of a block table."""
        for block in found:
            self._cached.pop(block, None)
            self._references[block] += 1
        return list(found)

    def allocate(self, count: int) -> list[int]:
        """Lends `count` blocks without contents; ask `can_lend` first."""
        assert count <= self.available
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def has_name(self, block: int) -> bool:
        """True when the block's contents are known, or about to be."""
        return block in self._name_of

    def name(self, block: int, name: bytes) -> bool:
        """Says what a lent block holds, from now on for ever; False when another block holds the same."""
        assert self._references[block] > 0
        if name in self._block_named:
            return False
        assert block not in self._name_of
        self._name_of[block] = name
        self._block_named[name] = block
        return True

    def forget(self, block: int) -> None:
        """Takes the name of a block back: its contents never came to be."""
        del self._block_named[self._name_of.pop(block)]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def release(self, block_table: Sequence[int]) -> None:
        """Takes back the blocks of a sequence that has ended."""
        for block in reversed(block_table):
            self._references[block] -= 1
            if self._references[block] == 0 and block in self._name_of:
                self._cached[block] = None
            elif self._references[block] == 0:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_named[self._name_of.pop(block)]
        self.num_evicted += 1
        return block
