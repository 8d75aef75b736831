"""The layers of the text model over a packed row, with the weights and blocks that Transformers loaded.

The arithmetic is that of `Qwen3VLTextDecoderLayer` and its MoE twin; what one row has in common is done
once: the projections of queries, keys and values are one matrix product, those of the MLP's gate and its
way up another one, and norms and rotations go over queries and keys together.
"""

from typing import Any

import torch
from torch.nn.functional import silu

from decoder_service.engine.attention import PackedPlan, attend
from shared.frozen_linear import FrozenLinear


class TextLayer:
    """One layer: `[N, hidden_size]` in and out."""

    def __init__(self, layer: Any, number: int) -> None:
        self._attention = _Attention(layer.self_attn, number)
        self._mlp = _Mlp(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _ExpertMlp(layer.mlp)
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm

    def multiply_all(self, hidden: torch.Tensor) -> None:
        """Only the matrix products of `forward`, for measuring what is left to gain."""
        self._attention.multiply_all(hidden)
        self._mlp.forward(hidden)

    def forward(self, hidden: torch.Tensor, rotation: "Rotation", plan: PackedPlan) -> torch.Tensor:
        hidden = hidden + self._attention.forward(norm(self._before_attention, hidden), rotation, plan)
        return hidden + self._mlp.forward(norm(self._before_mlp, hidden))


class Rotation:
    """The rotary embedding of a row's positions: cosines and sines `[N, 1, head_dim]`."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = cos.shape[-1] // 2
        self._cos = cos
        # Halves are swapped below instead of being negated and swapped: the sign is with the sines.
        self._sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        self._half = half

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """`[N, heads, head_dim]`, turned by the positions."""
        return torch.addcmul(heads * self._cos, heads.roll(self._half, dims=-1), self._sin)


class _Attention:
    def __init__(self, module: Any, number: int) -> None:
        self._number = number
        self._scaling = float(module.scaling)
        self._head_dim = int(module.head_dim)
        self._heads, self._kv_heads = (
            each.out_features // self._head_dim for each in (module.q_proj, module.k_proj)
        )
        self._projection = FrozenLinear.of(module.q_proj, module.k_proj, module.v_proj)
        self._out = FrozenLinear.of(module.o_proj)
        weights = [
            module.q_norm.weight.expand(self._heads, -1),
            module.k_norm.weight.expand(self._kv_heads, -1),
        ]
        self._norm_weight = torch.cat(weights).contiguous()
        self._epsilon = float(module.q_norm.variance_epsilon)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, plan: PackedPlan) -> torch.Tensor:
        projected = self._projection.forward(hidden).view(len(hidden), -1, self._head_dim)
        turning, value = torch.split(projected, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        normed = _norm(turning, self._norm_weight, self._epsilon)
        query, key = torch.split(rotation.turn(normed), [self._heads, self._kv_heads], dim=1)
        attended = attend(plan, self._number, query, key, value, scaling=self._scaling)
        return self._out.forward(attended.reshape(len(hidden), -1))

    def multiply_all(self, hidden: torch.Tensor) -> None:
        projected = self._projection.forward(hidden)
        self._out.forward(projected[:, : self._heads * self._head_dim].contiguous())


class _Mlp:
    def __init__(self, module: Any) -> None:
        self._projection = FrozenLinear.of(module.gate_proj, module.up_proj)
        self._down = FrozenLinear.of(module.down_proj)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._projection.forward(hidden).chunk(2, dim=-1)
        return self._down.forward(silu(gate).mul_(up))


class _ExpertMlp:
    """A sparse block as it is, on a batch of one row."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._module(hidden[None])[0]
        return output


def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What an RMS norm of the model does."""
    return _norm(hidden, module.weight, module.variance_epsilon)


def _norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """In float32 but for the weight."""
    wide = hidden.float()
    scale = (wide * wide).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * scale).to(hidden.dtype).mul_(weight)
