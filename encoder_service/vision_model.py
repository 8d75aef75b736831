"""The Qwen3-VL vision tower, alone: no language weight of the checkpoint is ever read."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from encoder_service.tower import Patches
from encoder_service.weights import vision_tensors
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import Modality

# Part of every key's namespace: raise the version when the same patches may give other features.
IMPLEMENTATION = "transformers-sdpa/1"

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
        self._patch_width = config.in_channels * config.temporal_patch_size * config.patch_size**2

    @classmethod
    def open(cls, directory: Path, *, device: torch.device, dtype: torch.dtype) -> Self:
        """Reads the tensors of the tower, each straight into its place on `device`.

        Raises:
            ValueError: the checkpoint is no Qwen3-VL.
            RuntimeError: tensors are missing, unknown, or of another shape.
        """
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if config.model_type not in _TOWERS:
            raise ValueError(f"{directory}: {config.model_type} is no Qwen3-VL")
        tower_class = _TOWERS[config.model_type]
        with torch.device("meta"):
            tower = tower_class._from_config(config.vision_config, attn_implementation="sdpa", dtype=dtype)
        tensors = dict(vision_tensors(directory, device=device, dtype=dtype))
        tower.load_state_dict(tensors, strict=True, assign=True)
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

    def warm_up(self) -> None:
        """Runs the tower once, so that no caller pays for what is made on first use."""
        grid = Grid(1, 2 * self._merge_size, 2 * self._merge_size)
        self.encode([Patches(torch.zeros(grid.h * grid.w, self._patch_width), grid)])

    def namespace_fields(self) -> Iterator[tuple[str, str]]:
        """What decides the features that patches give, for the namespace of keys."""
        name = str(self._dtype).removeprefix("torch.")
        yield "tower", IMPLEMENTATION
        yield "compute_dtype", name
        yield "stored_dtype", name

    def _bundle(self, grid: Grid, features: torch.Tensor) -> FeatureBundle:
        return FeatureBundle(
            modality=Modality.IMAGE,
            grid=grid,
            tensor=features,
            hidden_size=self._hidden_size,
            deepstack_levels=self._levels,
        )
