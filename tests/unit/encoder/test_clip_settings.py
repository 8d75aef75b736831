"""The settings of clips: what is filled in, what is refused, and what sizes come of them."""

from dataclasses import replace
from typing import Any

import pytest
from qwen_vl_utils.vision_process import smart_resize

from encoder_service.media_settings import RequestedSettings
from shared.errors import InvalidMediaSettings
from shared.features.grid import Grid
from shared.features.key import EffectiveSettings
from tests.unit.encoder.harness import CLIP_POLICY, demo_clips


def resolved(*, is_list: bool = False, **wishes: Any) -> EffectiveSettings:
    return CLIP_POLICY.resolve(RequestedSettings(**wishes), is_list=is_list)


def test_what_is_unset_takes_the_defaults() -> None:
    assert resolved() == EffectiveSettings(True, 4096, 65_536, 262_144, 2.0, None)
    assert resolved(is_list=True) == EffectiveSettings(True, 4096, 65_536, 262_144, None, None)


def test_a_number_of_frames_takes_the_place_of_a_rate() -> None:
    """I30."""
    settings = resolved(num_frames=4)
    assert (settings.fps, settings.num_frames) == (None, 4)


def test_what_is_spelt_out_is_the_same_as_the_default() -> None:
    """C08."""
    assert resolved(fps=2.0, total_pixels=262_144) == resolved()


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"fps": 0.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"fps": 1e9}, "fps"),
        ({"fps": 1.0, "num_frames": 4}, "num_frames"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 65}, "num_frames"),
        ({"num_frames": 5, "total_pixels": 4096}, "num_frames"),
        ({"total_pixels": 1_048_577}, "total_pixels"),
        ({"max_pixels": 65_537}, "max_pixels"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels"),
        ({"do_resize": False, "total_pixels": 4096}, "total_pixels"),
    ],
)
def test_what_can_not_be_is_refused_by_name(wishes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidMediaSettings) as caught:
        resolved(**wishes)
    assert caught.value.field == f"settings.{field}"


def test_limits_that_decide_the_frames_are_part_of_the_namespace() -> None:
    """Two servers with other caps give other features for the same request."""
    other = replace(CLIP_POLICY, max_frames=32)
    assert dict(other.namespace_fields()) != dict(CLIP_POLICY.namespace_fields())


def test_frames_get_a_token_each_at_the_least() -> None:
    assert CLIP_POLICY.sampling(resolved(total_pixels=10 * 1024)).max_frames == 10


@pytest.mark.parametrize("frames", [1, 2, 5, 40])
@pytest.mark.parametrize("size", [(96, 96), (1920, 1080), (30, 500), (1, 1)])
def test_sizes_are_those_of_the_recipe_within_the_budgets(size: tuple[int, int], frames: int) -> None:
    settings = resolved()
    assert settings.total_pixels is not None
    padded = frames + frames % 2
    most = min(65_536, settings.total_pixels // padded)
    width, height = demo_clips().target_size(*size, frames, settings)
    want = smart_resize(size[1], size[0], 32, min_pixels=min(4096, most), max_pixels=most)
    assert (height, width) == tuple(max(32, side) for side in want)
    assert demo_clips().grid((width, height), frames) == Grid(padded // 2, height // 16, width // 16)
