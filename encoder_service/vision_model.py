"""The Qwen3-VL vision tower, alone: no language weight of the checkpoint is ever read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from safetensors import safe_open
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from encoder_service.tower import Patches
from shared.checkpoint import Checkpoint, Placement
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import Modality

# Part of every key's namespace: raise the version when the same patches may give other features.
IMPLEMENTATION = "transformers-sdpa/1"

# As Transformers 5 and the hub name the tensors of a tower, and as older releases did.
_PREFIXES = ("model.visual.", "visual.")
_TOWERS: Mapping[str, Any] = {"qwen3_vl": Qwen3VLVisionModel, "qwen3_vl_moe": Qwen3VLMoeVisionModel}


class VisionModel:
    """The tower of one checkpoint on one device. One thread at a time may call it."""

    def __init__(self, tower: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._tower = tower
        self._device = device
        self._dtype = dtype
        config = tower.config
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
        pixels = torch.cat([patches.pixel_values for patches in batch])
        grids = [[patches.grid.t, patches.grid.h, patches.grid.w] for patches in batch]
        output = self._tower(
            pixels.to(self._device, self._dtype), grid_thw=torch.tensor(grids, device=self._device)
        )
        features = torch.cat([output.pooler_output, *output.deepstack_features], dim=-1).cpu()
        counts = [patches.grid.token_count(self._merge_size) for patches in batch]
        # Copies, so that no item keeps the memory of its neighbours alive.
        rows = [part.clone() for part in torch.split(features, counts)] if len(batch) > 1 else [features]
        return [self._bundle(patches.grid, part) for patches, part in zip(batch, rows, strict=True)]

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
