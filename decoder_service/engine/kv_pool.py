"""The key and value tensors of the KV cache; knows slots as rows, not whose they are (see kv_cache.py)."""

from dataclasses import dataclass

import torch

from decoder_service.engine.kv_cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KVShape:
    """What the cache holds of one token: a key and a value per layer and head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.row_bytes * BLOCK_TOKENS

    def blocks_within(self, size_bytes: int) -> int:
        """Blocks of a cache of at most `size_bytes`."""
        return size_bytes // self.block_bytes


class KVPool:
    """Rows of keys and values, `[slots, 2, kv_heads, head_dim]` in each layer, made once at the start.

    A token's key and value lie side by side, so that one gather reads both. What a slot holds before it is
    written is never looked at, and so it begins as whatever the memory holds: on the CPU the pages of a slot
    are not even there until it is used for the first time.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks * BLOCK_TOKENS, 2, shape.num_kv_heads, shape.head_dim)
        self._rows = [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self._flat = [rows.flatten(1) for rows in self._rows]
        self._gathered = self._flat[0][:0]
        self.shape = shape

    @property
    def device(self) -> torch.device:
        return self._rows[0].device

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values `[n, kv_heads, head_dim]` in n slots of a layer."""
        self._rows[layer].index_copy_(0, slots, torch.stack([keys, values], dim=1))

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The rows of n slots of a layer, `[n, 2, kv_heads, head_dim]`.

        They are in memory that the next gather uses again: fresh pages would cost more than the copy.
        """
        count = len(slots)
        if len(self._gathered) < count:
            self._gathered = self._gathered.new_empty(count, self._gathered.shape[1])
        rows = torch.index_select(self._flat[layer], 0, slots, out=self._gathered[:count])
        return rows.view(count, *self._rows[layer].shape[1:])


class BlockNumbers:
    """A sequence's block table as a tensor that grows with it; made anew for another list."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(16, dtype=torch.long, device=device)
        self._table: list[int] = []
        self._count = 0

    def of(self, block_table: list[int]) -> torch.Tensor:
        """`[len(block_table)]`; takes over only what is new since the last time."""
        if block_table is not self._table:
            self._table, self._count = block_table, 0
        new = block_table[self._count :]
        if self._count + len(new) > len(self._numbers):
            grown = self._numbers.new_empty(2 * (self._count + len(new)))
            grown[: self._count] = self._numbers[: self._count]
            self._numbers = grown
        if new:
            self._numbers[self._count : self._count + len(new)] = torch.tensor(new)
            self._count += len(new)
        return self._numbers[: self._count]
