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
    def block_bytes(self) -> int:
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * BLOCK_TOKENS
        return values * self.dtype.itemsize

    def blocks_within(self, size_bytes: int) -> int:
        """Blocks of a cache of at most `size_bytes`."""
        return size_bytes // self.block_bytes


class KVPool:
    """Rows of keys and values, `[slots, kv_heads, head_dim]` in each layer, made once at the start.

    What a slot holds before it is written is never read, and so the rows begin as whatever the memory
    holds: on the CPU the pages of a slot are not even there until it is used for the first time.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks * BLOCK_TOKENS, shape.num_kv_heads, shape.head_dim)
        layers = range(shape.num_layers)
        self._keys = [torch.empty(size, dtype=shape.dtype, device=device) for _ in layers]
        self._values = [torch.empty(size, dtype=shape.dtype, device=device) for _ in layers]

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values `[n, kv_heads, head_dim]` in n slots of a layer."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of n slots of a layer, `[n, kv_heads, head_dim]` each."""
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)


def slots_of(block_table: list[int], device: torch.device) -> torch.Tensor:
    """The slots of a sequence's tokens, in their order: all of its blocks', `[16 * blocks]`."""
    blocks = torch.tensor(block_table, dtype=torch.long, device=device)
    offsets = torch.arange(BLOCK_TOKENS, device=device)
    return (blocks[:, None] * BLOCK_TOKENS + offsets).reshape(-1)
