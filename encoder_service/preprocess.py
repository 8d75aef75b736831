"""RGB picture → patches and grid, with the checkpoint's own processor.

The recipe, which the reference of `make verify` shares: one bicubic resize by Pillow (where the picture is
decoded) to the size that qwen-vl-utils finds, then the Hugging Face image processor without one of its own.
The torchvision backend is pinned: the other one computes other pixels.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from transformers.image_utils import ChannelDimension
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from encoder_service.media import FIELD, RULES
from encoder_service.tower import Patches
from shared.errors import InvalidMedia, MediaTooLarge
from shared.features.grid import Grid
from shared.features.key import EffectiveSettings

# What decides the pixels beside the budgets, which belong to the request.
_PROCESSOR_VALUES = (
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
_LIBRARIES = ("transformers", "torch", "torchvision", "pillow", "av", "qwen-vl-utils")


class ImagePreprocessor:
    """The processor of one checkpoint. Thread-safe: a call changes nothing."""

    def __init__(self, processor: Qwen2VLImageProcessor) -> None:
        self._processor = processor
        self._patch_size = int(processor.patch_size)
        self._factor = self._patch_size * int(processor.merge_size)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Reads `preprocessor_config.json` of a checkpoint."""
        return cls(Qwen2VLImageProcessor.from_pretrained(directory, local_files_only=True))

    @property
    def pixel_budget(self) -> tuple[int, int]:
        """The checkpoint's own min_pixels and max_pixels, from whichever keys its config uses."""
        size = self._processor.size
        return int(size["shortest_edge"]), int(size["longest_edge"])

    def target_size(
        self, width: int, height: int, settings: EffectiveSettings, *, limit_pixels: int
    ) -> tuple[int, int]:
        """(width, height) that a picture is resized to; all that can be refused is refused here.

        Raises:
            InvalidMedia: do_resize is false and a side is no multiple of the patch-merge size.
            MediaTooLarge: do_resize is false and the picture exceeds `limit_pixels`.
        """
        if not settings.do_resize:
            self._check_final_size(width, height, limit_pixels)
            return width, height
        new_height, new_width = smart_resize(
            height,
            width,
            factor=self._factor,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
        )
        # A long strip within a small budget would come out with no rows at all.
        return max(new_width, self._factor), max(new_height, self._factor)

    def grid(self, size: tuple[int, int]) -> Grid:
        """The patch grid of a picture of this final size."""
        return Grid(1, size[1] // self._patch_size, size[0] // self._patch_size)

    def patches(self, image: Image.Image) -> Patches:
        """The patches of an RGB picture of its final size."""
        assert image.mode == "RGB"
        features = self._processor(
            images=image,
            do_resize=False,
            input_data_format=ChannelDimension.FIRST,
            return_tensors="pt",
        )
        t, h, w = features["image_grid_thw"][0].tolist()
        return Patches(features["pixel_values"], Grid(t, h, w))

    def namespace_fields(self) -> Iterator[tuple[str, str]]:
        """What decides the pixels that the tower sees, for the namespace of keys."""
        processor = self._processor
        values: dict[str, Any] = {name: getattr(processor, name) for name in _PROCESSOR_VALUES}
        yield "processor", f"{type(processor).__name__}/{processor.backend}"
        yield "processor_values", json.dumps(values, sort_keys=True, default=list)
        yield "media", RULES
        yield "resize", "pillow-bicubic-once"
        for library in _LIBRARIES:
            yield f"version:{library}", version(library)

    def _check_final_size(self, width: int, height: int, limit_pixels: int) -> None:
        if width % self._factor or height % self._factor:
            raise InvalidMedia(
                f"do_resize is false, but {width}x{height} are not multiples of {self._factor}", field=FIELD
            )
        if width * height > limit_pixels:
            raise MediaTooLarge(
                f"do_resize is false, and {width}x{height} pixels are more than the limit of {limit_pixels}",
                field=FIELD,
                limit="limit_max_pixels",
                value=str(limit_pixels),
            )
