"""What goes into the vision tower, and what every tower promises; knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One picture as the tower takes it: float32 `[grid.t * grid.h * grid.w, channels * t * p * p]`.

    Rows stand in the order of the processor: merged squares side by side.
    """

    pixel_values: torch.Tensor
    grid: Grid

    @property
    def count(self) -> int:
        return int(self.pixel_values.shape[0])


class VisionTower(Protocol):
    """Turns patches into features. Called from one thread at a time."""

    def encode(self, batch: Sequence[Patches]) -> list[FeatureBundle]:
        """One pass over a whole batch; one bundle for each item, in order.

        What an item gets does not depend on the others, up to the rounding of its dtype.
        """
