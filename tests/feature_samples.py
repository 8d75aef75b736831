"""Small features for tests."""

import math

import torch

from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality

HIDDEN_SIZE = 24
LEVELS = 3


def make_key(name: str = "a", *, tenant: str = "0") -> FeatureKey:
    """A key whose digest repeats one hexadecimal digit."""
    return FeatureKey(tenant * 64, "1" * 64, name * 64)


def make_bundle(
    dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, grid: Grid | None = None
) -> FeatureBundle:
    """A picture's features of random values; 16 tokens and 3 kB in bfloat16 unless a grid is given."""
    grid = grid or Grid(1, 8, 8)
    generator = torch.Generator().manual_seed(seed)
    rows = grid.token_count(2)
    tensor = torch.randn(rows, (1 + LEVELS) * HIDDEN_SIZE, generator=generator).to(dtype)
    return FeatureBundle(Modality.IMAGE, grid, tensor, HIDDEN_SIZE, LEVELS)


def make_clip(dtype: torch.dtype = torch.bfloat16) -> FeatureBundle:
    """A clip's features: two temporal patches with their times."""
    tensor = torch.randn(32, (1 + LEVELS) * HIDDEN_SIZE).to(dtype)
    return FeatureBundle(Modality.VIDEO, Grid(2, 8, 8), tensor, HIDDEN_SIZE, LEVELS, timestamps=(0.25, 1.25))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True when shape, dtype and every bit agree."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    )


def plain_fp8(bundle: FeatureBundle) -> torch.Tensor:
    """What is read of a bundle of ordinary numbers that was stored as fp8, row by row and level by level."""
    rows = [_plain_fp8_row(row) for level in bundle.levels() for row in level]
    levels = torch.stack(rows).view(1 + bundle.deepstack_levels, bundle.token_count, -1)
    return levels.transpose(0, 1).reshape(bundle.token_count, -1).to(torch.bfloat16)


def _plain_fp8_row(row: torch.Tensor) -> torch.Tensor:
    scale = 2.0 ** math.ceil(math.log2(row.abs().max().item() / 448))
    return (row.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
