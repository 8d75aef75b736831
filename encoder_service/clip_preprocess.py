"""Chosen frames → patches and grid, with the checkpoint's own video processor.

The recipe, which the reference of `make verify` shares: one bicubic resize of each frame to the size found
here, then the Hugging Face video processor without a resize and a choice of its own.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from encoder_service.sampling import TEMPORAL_PATCH, patches_of
from encoder_service.tower import Patches
from shared.features.grid import Grid
from shared.features.key import EffectiveSettings

# Part of every key's namespace: raise the version when the same clip may give other pixels or times.
RULES = "evenly-upright-over-white-bicubic-once/1"
_VALUES = (
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "image_mean",
    "image_std",
    "merge_size",
    "patch_size",
    "rescale_factor",
    "temporal_patch_size",
)


class ClipPreprocessor:
    """The video processor of one checkpoint. Thread-safe: a call changes nothing."""

    def __init__(self, processor: Qwen3VLVideoProcessor) -> None:
        self._processor = processor
        self._patch_size = int(processor.patch_size)
        self.factor = self._patch_size * int(processor.merge_size)
        assert processor.temporal_patch_size == TEMPORAL_PATCH

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Reads `video_preprocessor_config.json` of a checkpoint."""
        return cls(Qwen3VLVideoProcessor.from_pretrained(directory, local_files_only=True))

    @property
    def frame_tokens(self) -> int:
        """Most visual tokens of one frame, by default."""
        return int(self._processor.max_video_tokens)

    @property
    def pixel_budget(self) -> tuple[int, int]:
        """The checkpoint's own fewest pixels of a frame, and most of all frames together."""
        size = self._processor.size
        return int(size["shortest_edge"]), int(size["longest_edge"])

    @property
    def frame_limits(self) -> tuple[int, int]:
        """The checkpoint's own fewest and most frames of a clip that is sampled by frames per second."""
        return int(self._processor.min_frames), int(self._processor.max_frames)

    def target_size(
        self, width: int, height: int, num_frames: int, settings: EffectiveSettings
    ) -> tuple[int, int]:
        """(width, height) that each of so many frames is resized to: multiples of the patch-merge size.

        As near to the clip's own size and shape as the budgets allow; `total_pixels` goes before
        `min_pixels`. The arithmetic is that of qwen-vl-utils' `smart_resize`.
        """
        if not settings.do_resize:
            return width, height
        assert settings.min_pixels is not None
        assert settings.max_pixels is not None
        assert settings.total_pixels is not None
        padded = patches_of(num_frames) * TEMPORAL_PATCH
        most = min(settings.max_pixels, settings.total_pixels // padded)
        least = min(settings.min_pixels, most)
        sides = [max(self.factor, round(side / self.factor) * self.factor) for side in (width, height)]
        pixels = sides[0] * sides[1]
        if pixels > most:
            shrink = math.sqrt(width * height / most)
            sides = [self._floor(side / shrink) for side in (width, height)]
        elif pixels < least:
            grow = math.sqrt(least / (width * height))
            sides = [math.ceil(side * grow / self.factor) * self.factor for side in (width, height)]
        return sides[0], sides[1]

    def grid(self, size: tuple[int, int], num_frames: int) -> Grid:
        """The patch grid of so many frames of this size."""
        return Grid(patches_of(num_frames), size[1] // self._patch_size, size[0] // self._patch_size)

    def patches(self, pixels: NDArray[np.uint8]) -> Patches:
        """The patches of frames `[T, height, width, 3]` of their final size."""
        frames = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)
        features = self._processor(
            videos=[frames],
            do_resize=False,
            do_sample_frames=False,
            cap_pixels_per_frame=False,  # says nothing without a resize, but that it is unset is warned of
            return_tensors="pt",
        )
        t, h, w = features["video_grid_thw"][0].tolist()
        return Patches(features["pixel_values_videos"], Grid(t, h, w))

    def namespace_fields(self) -> Iterator[tuple[str, str]]:
        """What decides the pixels of clips, for the namespace of keys."""
        values: dict[str, Any] = {name: getattr(self._processor, name) for name in _VALUES}
        yield "clip", RULES
        yield "video_processor", type(self._processor).__name__
        yield "video_processor_values", json.dumps(values, sort_keys=True, default=list)

    def _floor(self, side: float) -> int:
        return max(self.factor, math.floor(side / self.factor) * self.factor)
