"""The sides of the tower benchmark: our tower, Transformers', and the matrix products alone."""

import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from encoder_service.preprocess import ImagePreprocessor
from encoder_service.tower import Patches
from encoder_service.vision_model import VisionModel
from shared.checkpoint import Placement, open_checkpoint

EQUAL_PICTURES, EQUAL_SIDE = 16, 512
MIXED_PICTURES, SHORTEST_SIDE, LONGEST_SIDE = 64, 64, 1024
# Rows of a product that the ceiling tries; the best of them counts.
_CEILING_ROWS = (1024, 4096)


def equal_pictures(checkpoint: Path) -> list[Patches]:
    return _patches(checkpoint, [(EQUAL_SIDE, EQUAL_SIDE)] * EQUAL_PICTURES)


def mixed_pictures(checkpoint: Path, seed: int = 0) -> list[Patches]:
    """Sides log-uniform between the shortest and the longest."""
    rng = random.Random(seed)
    low, high = math.log(SHORTEST_SIDE), math.log(LONGEST_SIDE)
    sides = [round(math.exp(rng.uniform(low, high)) / 32) * 32 for _ in range(2 * MIXED_PICTURES)]
    return _patches(checkpoint, list(zip(sides[::2], sides[1::2], strict=True)))


def num_patches(pictures: Sequence[Patches]) -> int:
    return sum(each.count for each in pictures)


class Tower:
    """Our tower; pictures go through it in passes of at most `pass_patches`, as the service's worker does."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = VisionModel.open(open_checkpoint(str(checkpoint)), Placement("cpu", "float32"))

    def seconds(self, pictures: Sequence[Patches], pass_patches: int) -> float:
        started = time.perf_counter()
        for batch in _passes(pictures, pass_patches):
            self._model.encode(batch)
        return time.perf_counter() - started


class Transformers:
    """`get_image_features` of the whole model."""

    def __init__(self, checkpoint: Path) -> None:
        whole: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = whole.model
        self._model.eval()

    @torch.inference_mode()
    def seconds(self, pictures: Sequence[Patches], at_once: int) -> float:
        started = time.perf_counter()
        for first in range(0, len(pictures), at_once):
            batch = pictures[first : first + at_once]
            grids = torch.tensor([[each.grid.t, each.grid.h, each.grid.w] for each in batch])
            self._model.get_image_features(torch.cat([each.pixel_values for each in batch]), grids)
        return time.perf_counter() - started


class Products:
    """Plain matrix products of the tower's shapes: what no implementation gets below."""

    def __init__(self, checkpoint: Path) -> None:
        config = open_checkpoint(str(checkpoint)).load_config().vision_config
        merged = config.hidden_size * config.spatial_merge_size**2
        mergers = 1 + len(config.deepstack_visual_indexes)
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._merge = int(config.spatial_merge_size) ** 2
        self._row_shapes = [
            (pixels, config.hidden_size),
            *[
                (config.hidden_size, 3 * config.hidden_size),
                (config.hidden_size, config.hidden_size),
                (config.hidden_size, config.intermediate_size),
                (config.intermediate_size, config.hidden_size),
            ]
            * config.depth,
        ]
        self._merged_shapes = [(merged, merged), (merged, config.out_hidden_size)] * mergers
        self._depth, self._heads = int(config.depth), int(config.num_heads)
        self._head_dim = int(config.hidden_size) // self._heads

    @torch.inference_mode()
    def seconds(self, pictures: Sequence[Patches]) -> float:
        row_seconds = min(self._linear_seconds(rows) / rows for rows in _CEILING_ROWS)
        linear = num_patches(pictures) * row_seconds
        return linear + sum(self._attention_seconds(each) for each in _distinct(pictures))

    def _linear_seconds(self, rows: int) -> float:
        return sum(_product_seconds(rows, *shape) for shape in self._row_shapes) + sum(
            _product_seconds(rows // self._merge, *shape) for shape in self._merged_shapes
        )

    def _attention_seconds(self, counted: tuple[int, int]) -> float:
        """Both products of all heads and layers, for so many pictures of as many patches."""
        count, patches = counted
        query = torch.randn(self._heads, patches, self._head_dim)
        started = time.perf_counter()
        torch.bmm(torch.bmm(query, query.transpose(1, 2)), query)
        return (time.perf_counter() - started) * count * self._depth


def _distinct(pictures: Sequence[Patches]) -> list[tuple[int, int]]:
    sizes = sorted(each.count for each in pictures)
    return [(len(list(same)), size) for size, same in itertools.groupby(sizes)]


def _product_seconds(rows: int, width: int, out: int) -> float:
    hidden, weight = torch.randn(rows, width), torch.randn(out, width)
    started = time.perf_counter()
    torch.mm(hidden, weight.t())
    return time.perf_counter() - started


def _passes(pictures: Sequence[Patches], most: int) -> list[list[Patches]]:
    passes: list[list[Patches]] = [[]]
    for picture in pictures:
        if passes[-1] and num_patches(passes[-1]) + picture.count > most:
            passes.append([])
        passes[-1].append(picture)
    return passes


def _patches(checkpoint: Path, sizes: Sequence[tuple[int, int]]) -> list[Patches]:
    preprocessor = ImagePreprocessor.open(checkpoint)
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
    return [preprocessor.patches(Image.fromarray(each)) for each in noise]
