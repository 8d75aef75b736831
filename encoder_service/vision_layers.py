"""The layers of the vision tower over packed patches, with the weights that Transformers' tower was given.

The arithmetic is that of `Qwen3VLVisionModel`; what it does for one picture after the other is done for all
of one size at once:

- the patch convolution, whose stride is its kernel, is one matrix product;
- positions and rotations depend on a picture's grid alone, and are kept for the grids that came last;
- pictures of as many patches look at themselves in one call, side by side (a clip's temporal patches do so
  each by itself);
- what needs a row alone (norms, projections, MLP) goes over a few thousand rows at a time, so that memory is
  bounded for the largest picture, and small enough for the processor's cache.

Within a head of queries and keys, dimension i is put beside dimension i + head_dim / 2: their products do not
change, and the rotation of the pair is one complex product in place.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from shared.features.grid import Grid
from shared.frozen_linear import Activation, FrozenLinear

_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Rows that go through the row-wise parts together.
TILE_ROWS = 4096
# Patches of all grids whose positions are kept.
_KEPT_PATCHES = 128 * 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """Grids in the order of their rows, those of one frame size side by side."""

    grids: tuple[Grid, ...]

    @property
    def rows(self) -> int:
        return sum(grid.t * grid.h * grid.w for grid in self.grids)

    def segments(self) -> Iterator[tuple[int, int]]:
        """(how many, patches of each) of frames of one size, which look at themselves in one call."""
        for patches, grids in groupby(self.grids, key=lambda grid: grid.h * grid.w):
            yield sum(grid.t for grid in grids), patches


class VisionLayers:
    """`[N, channels * t * p * p]` patches to `[N / merge**2, (1 + L) * out_hidden_size]`.

    Takes the weights of `tower`, a Qwen3VLVisionModel or its MoE twin, which can't be used any more.
    """

    def __init__(self, tower: Any) -> None:
        projection = tower.patch_embed.proj
        self._embed = FrozenLinear(projection.weight.flatten(1), projection.bias)
        self._places = _Places(tower)
        self._blocks = [_Block(block) for block in tower.blocks]
        self._merger = _Merger(tower.merger)
        levels = zip(tower.deepstack_visual_indexes, tower.deepstack_merger_list, strict=True)
        self._deepstack = {layer: (1 + level, _Merger(each)) for level, (layer, each) in enumerate(levels)}
        self._out_width = self._merger.out_features
        self._merged = int(tower.spatial_merge_size) ** 2

    def forward(self, pixels: torch.Tensor, packed: Packed) -> torch.Tensor:
        embedding, rotation = self._places.of(packed.grids)
        hidden = self._embed.add_to(embedding, pixels)
        width = (1 + len(self._deepstack)) * self._out_width
        features = hidden.new_empty(packed.rows // self._merged, width)
        for number, block in enumerate(self._blocks):
            hidden = block.forward(hidden, rotation, packed)
            if number in self._deepstack:
                level, merger = self._deepstack[number]
                merger.write(hidden, self._level(features, level))
        self._merger.write(hidden, self._level(features, 0))
        return features

    def _level(self, features: torch.Tensor, level: int) -> torch.Tensor:
        return features[:, level * self._out_width : (level + 1) * self._out_width]


class _Places:
    """What a grid's patches get for standing where they stand; the last grids' are kept."""

    def __init__(self, tower: Any) -> None:
        self._table = tower.pos_embed.weight.detach()
        self._interpolation = {
            "num_grid_per_side": tower.num_grid_per_side,
            "mode": tower.interpolation_mode,
            "align_corners": tower.interpolation_align_corners,
            "spatial_merge_size": tower.config.spatial_merge_size,
        }
        self._rotary = tower.rotary_pos_emb
        self._kept: OrderedDict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def of(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        """Learned embedding `[N, hidden_size]` and complex rotation `[N, 1, 1, head_dim / 2]` of all rows."""
        each = [self._of_frame(grid.h, grid.w) for grid in grids for _ in range(grid.t)]
        if len(each) == 1:
            return each[0]
        embeddings, rotations = zip(*each, strict=True)
        return torch.cat(embeddings), torch.cat(rotations)

    def _of_frame(self, h: int, w: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (h, w) in self._kept:
            self._kept.move_to_end((h, w))
        else:
            self._kept[h, w] = self._compute(h, w)
            while len(self._kept) > 1 and sum(h * w for h, w in self._kept) > _KEPT_PATCHES:
                self._kept.popitem(last=False)
        return self._kept[h, w]

    def _compute(self, h: int, w: int) -> tuple[torch.Tensor, torch.Tensor]:
        grid = torch.tensor([[1, h, w]], device=self._table.device)
        places, weights = get_vision_interpolation_indices_and_weights(grid, **self._interpolation)
        embedding = (self._table[places] * weights[:, :, None]).sum(1).to(self._table.dtype)
        position_ids = get_vision_position_ids(grid, self._interpolation["spatial_merge_size"])
        cos, sin = self._rotary(embedding, position_ids)
        half = cos.shape[-1] // 2  # the other half repeats it
        return embedding, torch.complex(cos[:, :half].float(), sin[:, :half].float())[:, None, None]


class _Block:
    def __init__(self, block: Any) -> None:
        attention = block.attn
        self._norm1, self._norm2 = _Norm(block.norm1), _Norm(block.norm2)
        self._heads, self._head_dim = int(attention.num_heads), int(attention.head_dim)
        self._scaling = float(attention.scaling)
        self._qkv = FrozenLinear(*_paired(attention.qkv, self._heads, self._head_dim))
        self._out = FrozenLinear.of(attention.proj)
        self._up, self._down = FrozenLinear.of(block.mlp.linear_fc1), FrozenLinear.of(block.mlp.linear_fc2)
        self._activation = _ACTIVATIONS[block.attn.config.hidden_act]

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor, packed: Packed) -> torch.Tensor:
        projected = _by_tiles(lambda tile: self._project(hidden[tile], rotation[tile]), len(hidden))
        attended = self._attend(projected, packed)
        return _by_tiles(lambda tile: self._transform(hidden[tile], attended[tile]), len(hidden))

    def _project(self, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Rotated queries, rotated keys and values: `[rows, 3, heads, head_dim]`."""
        projected = self._qkv.forward(self._norm1.forward(hidden))
        projected = projected.view(len(hidden), 3, self._heads, self._head_dim)
        _rotate(projected[:, :2], rotation)
        return projected

    def _attend(self, projected: torch.Tensor, packed: Packed) -> torch.Tensor:
        """`[N, heads * head_dim]`."""
        outputs = []
        begin = 0
        for count, patches in packed.segments():
            rows = projected[begin : begin + count * patches].view(count, patches, *projected.shape[1:])
            query, key, value = (rows[:, :, which].transpose(1, 2) for which in range(3))
            attended = scaled_dot_product_attention(query, key, value, scale=self._scaling)
            outputs.append(attended.transpose(1, 2).reshape(count * patches, -1))
            begin += count * patches
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _transform(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        hidden = self._out.add_to(hidden, attended)
        return self._down.add_to(
            hidden, self._up.forward(self._norm2.forward(hidden), activation=self._activation)
        )


class _Merger:
    """Squares of patches to visual tokens."""

    def __init__(self, merger: Any) -> None:
        self._width = int(merger.hidden_size)
        self._is_normed_merged = bool(merger.use_postshuffle_norm)
        self._norm = _Norm(merger.norm)
        self.out_features = int(merger.linear_fc2.out_features)
        self._up, self._down = FrozenLinear.of(merger.linear_fc1), FrozenLinear.of(merger.linear_fc2)

    def write(self, hidden: torch.Tensor, features: torch.Tensor) -> None:
        """`[N, hidden_size]` into `[N / merge**2, out_features]`."""
        merged = hidden.view(len(features), self._width)
        for tile in _tiles(len(merged)):
            rows = merged[tile]
            if self._is_normed_merged:
                rows = self._norm.forward(rows)
            else:
                rows = self._norm.forward(rows.view(-1, hidden.shape[1])).view(-1, self._width)
            features[tile] = self._down.forward(self._up.forward(rows, activation="gelu"))


class _Norm:
    def __init__(self, module: Any) -> None:
        self._weight, self._bias = module.weight.detach(), module.bias.detach()
        self._epsilon = float(module.eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden, self._weight.shape, self._weight, self._bias, self._epsilon)


def _rotate(heads: torch.Tensor, rotation: torch.Tensor) -> None:
    """Turns `[rows, 2, heads, head_dim]` in place, in float32; pairs stand side by side."""
    wide = heads.float().view(*heads.shape[:-1], -1, 2)
    turned = torch.view_as_complex(wide).mul_(rotation)
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(turned).flatten(-2))


def _paired(qkv: Any, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a projection whose queries and keys have their rotated pairs side by side."""
    order = torch.arange(head_dim, device=qkv.weight.device).view(2, -1).t().flatten()
    arranged = []
    for tensor in (qkv.weight.detach(), qkv.bias.detach()):
        rows = tensor.view(3, heads, head_dim, -1)
        arranged.append(torch.cat([rows[:2, :, order], rows[2:]]).view(tensor.shape))
    del qkv.weight
    return arranged[0], arranged[1]


def _tiles(rows: int) -> Iterator[slice]:
    for begin in range(0, rows, TILE_ROWS):
        yield slice(begin, min(begin + TILE_ROWS, rows))


def _by_tiles(compute: Callable[[slice], torch.Tensor], rows: int) -> torch.Tensor:
    parts = [compute(tile) for tile in _tiles(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
