"""Ordinary classes in place of the heavy parts; tests steer them through their attributes."""

import threading
from collections.abc import Callable, Sequence

import torch

from encoder_service.tower import Patches
from shared.features.bundle import FeatureBundle
from shared.features.key import Modality

HIDDEN = 4
LEVELS = 3
MERGE = 2


class FakeTower:
    """A VisionTower whose features are the mean of each token's patches, level by level scaled.

    `passes` lists the number of items of each pass. While `gate` is closed, passes wait. `spoil` may raise,
    or change the features, of a whole batch.
    """

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.spoil: Callable[[Sequence[Patches], torch.Tensor], None] | None = None

    def encode(self, batch: Sequence[Patches]) -> list[FeatureBundle]:
        self.entered.set()
        assert self.gate.wait(timeout=30), "the test forgot to open the gate"
        self.passes.append(len(batch))
        return [self._bundle(batch, patches) for patches in batch]

    def _bundle(self, batch: Sequence[Patches], patches: Patches) -> FeatureBundle:
        means = patches.pixel_values.mean(dim=1).view(-1, MERGE**2).mean(dim=1, keepdim=True)
        scales = torch.arange(1.0, LEVELS + 2).repeat_interleave(HIDDEN)
        features = (means + 1.0) * scales
        if self.spoil is not None:
            self.spoil(batch, features)
        return FeatureBundle(
            modality=Modality.IMAGE,
            grid=patches.grid,
            tensor=features,
            hidden_size=HIDDEN,
            deepstack_levels=LEVELS,
        )
