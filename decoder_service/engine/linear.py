"""Matrix products with weights that never change, in the layout that the backend is fastest with.

On the CPU, oneDNN's packed layout reads each weight once and in order: measured on 74 M weights, which no
cache holds, a product with 16 rows takes less than half of the time that it takes with plain rows of weights.
"""

import torch
from torch import nn

# oneDNN packs for an expected number of rows; a layout for a small batch is good for large ones too.
_EXPECTED_ROWS = 16


class FrozenLinear:
    """Linear modules of one input as one product, `[N, in_features]` to `[N, sum of out_features]`.

    The modules give up their weights, so that nothing is in memory twice.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        weight = _joined([module.weight for module in modules])
        has_bias = modules[0].bias is not None
        self._bias = _joined([module.bias for module in modules]) if has_bias else None
        for module in modules:
            del module.weight
        self._is_packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._weight = _pack(weight) if self._is_packed else weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return nn.functional.linear(hidden, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self._weight, self._bias, "none", [], ""
        )
        return product


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).detach()


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
    return packed
