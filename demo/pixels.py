"""Owns the way from a drawn picture to the tower's patches; knows nothing of training.

The recipe is the service's: one bicubic resize to the size that `qwen_vl_utils.smart_resize` names,
then the arithmetic of the Hugging Face image processor with `do_resize=False`. It is repeated here
for batches of equal size because the processor is slow on many small pictures; a unit test holds
the two together.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from qwen_vl_utils import smart_resize

from demo.model import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH, TOKEN_PIXELS
from demo.scenes import Size

Pixels = NDArray[np.uint8]


def served_size(size: Size) -> Size:
    """The (width, height) at which the tower sees a picture of this (width, height)."""
    width, height = size
    new_height, new_width = smart_resize(height, width, TOKEN_PIXELS, MIN_PIXELS, MAX_PIXELS)
    return new_width, new_height


def fit(image: Image.Image) -> Image.Image:
    size = served_size(image.size)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def native_size(served: Size, rng: random.Random) -> Size:
    """A size of a file that is served at the given size: mostly that size, else near it."""
    for _ in range(3):
        if rng.random() < 0.6:
            break
        width, height = (edge + rng.randint(-15, 15) for edge in served)
        if served_size((width, height)) == served:
            return width, height
    if served == (256, 256) and rng.random() < 0.4:
        edge = rng.randint(256, 512)
        return edge, edge
    return served


def patchify(frames: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, frames, height, width, 3]` to patches `[n, patches, frames * 768]`."""
    count, depth, height, width, channels = frames.shape
    values = (frames.float() / 255 - 0.5) / 0.5
    rows, columns = height // TOKEN_PIXELS, width // TOKEN_PIXELS
    blocks = values.view(count, depth, rows, MERGE, PATCH, columns, MERGE, PATCH, channels)
    ordered = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return ordered.reshape(count, rows * columns * MERGE * MERGE, channels * depth * PATCH * PATCH)
