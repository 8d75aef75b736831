"""Pictures to patches, by the recipe of the reference."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from encoder_service.preprocess import ImagePreprocessor
from shared.errors import InvalidMedia, MediaTooLarge
from shared.features.grid import Grid
from shared.features.key import EffectiveSettings
from tests.unit.encoder.samples import hub_like, noise, patches_of

HUB = EffectiveSettings(do_resize=True, min_pixels=65_536, max_pixels=16_777_216)
FINAL = EffectiveSettings(do_resize=False)


def grid_of(preprocessor: ImagePreprocessor, size: tuple[int, int], settings: EffectiveSettings) -> Grid:
    return patches_of(preprocessor, Image.new("RGB", size), settings).grid


@pytest.mark.parametrize("size", [(96, 64), (100, 50), (333, 217), (640, 480), (3, 500), (1, 1)])
def test_pixels_equal_the_recipe_written_out(
    hub_preprocessor: ImagePreprocessor, size: tuple[int, int]
) -> None:
    picture = noise(*size)
    width, height = size
    new_height, new_width = smart_resize(height, width, factor=32, min_pixels=65_536, max_pixels=16_777_216)
    resized = picture.resize((new_width, new_height), Image.Resampling.BICUBIC)
    processor = Qwen2VLImageProcessor(
        patch_size=16, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5], do_resize=False
    )
    want = processor(images=resized, return_tensors="pt")
    got = patches_of(hub_preprocessor, picture, HUB)
    assert torch.equal(got.pixel_values, want["pixel_values"])
    assert [got.grid.t, got.grid.h, got.grid.w] == want["image_grid_thw"][0].tolist()


# I05, I11, I12, I15: (width, height) and the grid of the reference
@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((1, 1), Grid(1, 16, 16)),
        ((16, 16), Grid(1, 16, 16)),
        ((27, 257), Grid(1, 50, 6)),
        ((200, 1), Grid(1, 2, 228)),
        ((3, 300), Grid(1, 160, 2)),
        ((300, 3), Grid(1, 2, 160)),
        ((1024, 1024), Grid(1, 64, 64)),
    ],
)
def test_small_and_narrow_pictures_have_the_grid_of_their_size(
    hub_preprocessor: ImagePreprocessor, size: tuple[int, int], want: Grid
) -> None:
    assert grid_of(hub_preprocessor, size, HUB) == want
    target = hub_preprocessor.target_size(*size, HUB, limit_pixels=0)
    assert hub_preprocessor.grid(target) == want


# I15
@pytest.mark.parametrize(
    "changes",
    [
        {"size": {"shortest_edge": 65_536, "longest_edge": 200_000}},
        {"size": None, "min_pixels": 65_536, "max_pixels": 200_000},
        {"max_pixels": 200_000},
    ],
)
def test_a_budget_of_the_checkpoint_counts_under_either_name(
    tmp_path: Path, hub_preprocessor: ImagePreprocessor, changes: dict[str, object]
) -> None:
    configured = ImagePreprocessor.open(hub_like(tmp_path, **changes))
    assert configured.pixel_budget == (65_536, 200_000)
    low, high = configured.pixel_budget
    settings = EffectiveSettings(do_resize=True, min_pixels=low, max_pixels=high)
    for preprocessor in (configured, hub_preprocessor):
        assert grid_of(preprocessor, (2000, 2000), settings) == Grid(1, 26, 26)


def test_a_long_strip_in_a_small_budget_keeps_one_row(demo_preprocessor: ImagePreprocessor) -> None:
    settings = EffectiveSettings(do_resize=True, min_pixels=4096, max_pixels=65_536)
    assert grid_of(demo_preprocessor, (6400, 32), settings).h == 2


def test_pictures_of_final_size_stay_as_they_are(hub_preprocessor: ImagePreprocessor) -> None:
    assert grid_of(hub_preprocessor, (64, 32), FINAL) == Grid(1, 2, 4)
    for width, height in ((65, 32), (64, 33)):
        with pytest.raises(InvalidMedia, match="multiples of 32"):
            hub_preprocessor.target_size(width, height, FINAL, limit_pixels=10_000)
    with pytest.raises(MediaTooLarge, match="2047"):
        hub_preprocessor.target_size(64, 32, FINAL, limit_pixels=2047)


# C30
def test_the_namespace_covers_processor_and_libraries(
    tmp_path: Path, hub_preprocessor: ImagePreprocessor
) -> None:
    fields = dict(hub_preprocessor.namespace_fields())
    assert fields["processor"] == "Qwen2VLImageProcessor/torchvision"
    libraries = {"transformers", "torch", "torchvision", "pillow", "qwen-vl-utils"}
    assert {f"version:{library}" for library in libraries} <= fields.keys()
    other = ImagePreprocessor.open(hub_like(tmp_path, image_mean=[0.4, 0.5, 0.5]))
    assert dict(other.namespace_fields()) != fields
    budget = ImagePreprocessor.open(hub_like(tmp_path, size={"shortest_edge": 4096, "longest_edge": 65536}))
    assert dict(budget.namespace_fields()) == fields
