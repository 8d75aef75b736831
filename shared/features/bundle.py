"""The tensors of one picture or clip as one value; knows neither their maker nor their keeper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.features.grid import Grid
from shared.features.key import Modality


@dataclass(frozen=True, slots=True)
class FeatureBundle:
    """What the vision tower says about one picture or clip.

    `tensor` is contiguous, on the CPU, `[token_count, (1 + deepstack_levels) * hidden_size]`, the levels
    side by side: `[main | deepstack_0 | ... | deepstack_{L-1}]` (the layout that vLLM, SGLang and
    TensorRT-LLM use too). `timestamps` holds the seconds of each temporal patch of a clip; it is empty
    for a picture.

    Bundles are shared: a process cache hands the same one to many requests at a time. Nobody writes into
    the tensor of a bundle, nor into a view of it; who needs other values makes a tensor of its own.
    """

    modality: Modality
    grid: Grid
    tensor: torch.Tensor
    hidden_size: int
    deepstack_levels: int
    timestamps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rows, width = self.tensor.shape
        assert width == (1 + self.deepstack_levels) * self.hidden_size, (width, self.hidden_size)
        assert rows > 0
        assert self.tensor.is_contiguous()
        assert self.tensor.device.type == "cpu"

    @classmethod
    def of_clip(cls, parts: "Sequence[FeatureBundle]", timestamps: tuple[float, ...]) -> "FeatureBundle":
        """A clip of features that were computed some temporal patches at a time."""
        first = parts[0]
        grid = Grid(sum(part.grid.t for part in parts), first.grid.h, first.grid.w)
        tensor = first.tensor if len(parts) == 1 else torch.cat([part.tensor for part in parts])
        return cls(
            Modality.VIDEO, grid, tensor, first.hidden_size, first.deepstack_levels, timestamps=timestamps
        )

    @property
    def token_count(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def levels(self) -> tuple[torch.Tensor, ...]:
        """Views of the main features and each DeepStack level, `[token_count, hidden_size]` each."""
        return torch.split(self.tensor, self.hidden_size, dim=1)

    def is_finite(self) -> bool:
        """True when no value is NaN or infinite (`aminmax` is twenty times cheaper than `isfinite`)."""
        low, high = torch.aminmax(self.tensor)
        return math.isfinite(low.item()) and math.isfinite(high.item())
