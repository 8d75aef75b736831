"""The Qwen3-VL vision tower, alone: no language weight of the checkpoint is ever read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from encoder_service.tower import Patches
from encoder_service.vision_layers import Packed, VisionLayers
from shared.checkpoint import Checkpoint, Placement
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import Modality
from shared.frozen_linear import return_freed_memory

# Part of every key's namespace: raise the version when the same patches may give other features.
IMPLEMENTATION = "own-layers/1"

# As Transformers 5 and the hub name the tensors of a tower, and as older releases did.
_PREFIXES = ("model.visual.", "visual.")
_TOWERS: Mapping[str, Any] = {"qwen3_vl": Qwen3VLVisionModel, "qwen3_vl_moe": Qwen3VLMoeVisionModel}


class VisionModel:
    """The tower of one checkpoint on one device. One thread at a time may call it."""

    def __init__(self, tower: Any, device: torch.device, dtype: torch.dtype) -> None:
        config = tower.config
        self._layers = VisionLayers(tower)
        return_freed_memory()
        self._device = device
        self._dtype = dtype
        self._merge_size = int(config.spatial_merge_size)
        self._hidden_size = int(config.out_hidden_size)
        self._levels = len(config.deepstack_visual_indexes)

    @classmethod
    def open(cls, checkpoint: Checkpoint, placement: Placement) -> Self:
        """Reads the tensors of the tower, each straight into its place on the device.

        Raises:
            RuntimeError: tensors are missing, unknown, or of another shape.
        """
        device, dtype = torch.device(placement.device), getattr(torch, placement.dtype)
        config = checkpoint.load_config().vision_config
        with torch.device("meta"):
            tower = _TOWERS[checkpoint.model_type]._from_config(
                config, attn_implementation="sdpa", dtype=dtype
            )
        tower.load_state_dict(dict(_tensors(checkpoint, device, dtype)), strict=True, assign=True)
        # The only values that no checkpoint holds: frequencies, computed from the configuration.
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)
        return cls(tower.eval().requires_grad_(requires_grad=False), device, dtype)

    @torch.inference_mode()
    def encode(self, batch: Sequence[Patches]) -> list[FeatureBundle]:
        """One pass over all patches; see `VisionTower`."""
        # Those of one size go side by side, where they look at themselves in one call.
        order = sorted(range(len(batch)), key=lambda number: _frame_patches(batch[number].grid))
        pixels = _joined([batch[number].pixel_values for number in order])
        packed = Packed(tuple(batch[number].grid for number in order))
        features = self._layers.forward(pixels.to(self._device, self._dtype), packed).cpu()
        parts = torch.split(features, [grid.token_count(self._merge_size) for grid in packed.grids])
        # Copies, so that no item keeps the memory of its neighbours alive.
        rows = dict(zip(order, (part.clone() if len(parts) > 1 else part for part in parts), strict=True))
        return [self._bundle(patches.grid, rows[number]) for number, patches in enumerate(batch)]

    def namespace_fields(self) -> Iterator[tuple[str, str]]:
        """What decides the features that patches give, for the namespace of keys."""
        yield "tower", IMPLEMENTATION
        yield "compute_dtype", str(self._dtype).removeprefix("torch.")

    def _bundle(self, grid: Grid, features: torch.Tensor) -> FeatureBundle:
        return FeatureBundle(
            modality=Modality.IMAGE,
            grid=grid,
            tensor=features,
            hidden_size=self._hidden_size,
            deepstack_levels=self._levels,
        )


def _frame_patches(grid: Grid) -> int:
    return grid.h * grid.w


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _tensors(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor under its name within the tower, in memory of its own: the mapped files are let go."""
    for path in checkpoint.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                if name.startswith(_PREFIXES):
                    stored = file.get_tensor(name)
                    copy = torch.empty(stored.shape, device=device, dtype=dtype).copy_(stored)
                    yield name.split("visual.", maxsplit=1)[1], copy
