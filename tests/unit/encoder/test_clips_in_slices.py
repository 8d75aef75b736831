"""Clips through the use case: in slices, in the order of their frames; and what is refused."""

import numpy as np
import pytest
import torch

from demo.pair import DEMO_CHECKPOINT
from encoder_service.clip import Frames
from encoder_service.intake import Content
from encoder_service.media_settings import RequestedSettings
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Outcome
from encoder_service.vision_model import VisionModel
from shared.checkpoint import Placement, open_checkpoint
from shared.errors import InvalidMedia, MediaTooLarge
from shared.features.bundle import FeatureBundle
from shared.features.key import Modality
from tests.clips import counted_frames, png, video
from tests.unit.encoder.harness import an_encoder, demo_clips, medium
from tests.unit.encoder.samples import noise, solid


def frames_of(*pngs: bytes, seconds: float = 0.5) -> Content:
    times = tuple(number * seconds for number in range(len(pngs)))
    return Content(Modality.VIDEO, frames=pngs, times=times)


@pytest.mark.parametrize("most_patches", [1, 24, 50, 10_000])
async def test_slices_give_the_features_of_the_whole(
    demo_preprocessor: ImagePreprocessor, most_patches: int
) -> None:
    model = VisionModel.open(open_checkpoint(str(DEMO_CHECKPOINT)), Placement("cpu", "float32"))
    pixels = np.stack([np.asarray(noise(96, 64, seed=seed)) for seed in range(7)])
    frames = Frames(pixels, tuple(map(float, range(7))))
    [whole] = model.encode([demo_clips().patches(pixels)])
    async with an_encoder(demo_preprocessor) as harness:
        slices = harness.intake.slices(frames, most_patches)
        parts = [model.encode([await harness.intake.patches(each, Modality.VIDEO)])[0] for each in slices]
    joined = FeatureBundle.of_clip(parts, (0.5, 2.5, 4.5, 6.0))
    assert sum(len(each.times) for each in slices) == 7
    assert joined.grid == whole.grid
    torch.testing.assert_close(joined.tensor, whole.tensor, rtol=0, atol=1e-5)


async def test_a_clip_is_computed_in_passes_and_stored_with_its_times(
    demo_preprocessor: ImagePreprocessor,
) -> None:
    content = frames_of(*map(png, counted_frames(5)))
    async with an_encoder(demo_preprocessor, max_batch_patches=24) as harness:
        first = await harness.service.encode(medium(content))
        again = await harness.service.encode(medium(content))
        assert (first.outcome, again.outcome) == (Outcome.ENCODED, Outcome.HIT)
        assert harness.tower.passes == [1, 1, 1]
    manifest = first.feature.manifest
    assert manifest.modality is Modality.VIDEO
    assert (manifest.grid.t, manifest.grid.h, manifest.grid.w) == (3, 4, 6)
    assert manifest.timestamps == (0.25, 1.25, 2.0)


async def test_a_file_is_sampled_by_the_wishes_of_the_request(demo_preprocessor: ImagePreprocessor) -> None:
    content = Content(Modality.VIDEO, video(counted_frames(20), fps=10))
    async with an_encoder(demo_preprocessor) as harness:
        by_number = await harness.service.encode(medium(content, RequestedSettings(num_frames=6)))
        by_rate = await harness.service.encode(medium(content, RequestedSettings(fps=5.0)))
    assert by_number.feature.manifest.grid.t == 3
    assert by_rate.feature.manifest.grid.t == 5
    assert by_rate.settings.fps == 5.0


# I47
async def test_more_frames_than_the_cap_are_refused_before_any_is_decoded(
    demo_preprocessor: ImagePreprocessor,
) -> None:
    content = frames_of(*[b"not even a picture"] * 5000)
    async with an_encoder(demo_preprocessor) as harness:
        with pytest.raises(MediaTooLarge) as caught:
            await harness.service.encode(medium(content))
    assert caught.value.metadata == {"limit": "max_clip_frames", "value": "64"}


async def test_a_frame_that_can_not_be_decoded_is_named(demo_preprocessor: ImagePreprocessor) -> None:
    content = frames_of(solid("red"), solid("blue"), solid("red")[:60])
    async with an_encoder(demo_preprocessor) as harness:
        with pytest.raises(InvalidMedia) as caught:
            await harness.service.encode(medium(content))
        assert caught.value.field == "media.frames[2]"
        assert harness.tower.passes == []
        assert (await harness.service.encode(medium(frames_of(solid("red"))))).outcome is Outcome.ENCODED


@pytest.mark.parametrize("other", [(64, 96), (96, 96), (192, 128)])
async def test_frames_of_another_size_are_refused_by_name(
    demo_preprocessor: ImagePreprocessor, other: tuple[int, int]
) -> None:
    content = frames_of(solid("red", 96, 64), solid("blue", *other))
    async with an_encoder(demo_preprocessor) as harness:
        with pytest.raises(InvalidMedia, match="size of the first") as caught:
            await harness.service.encode(medium(content))
    assert caught.value.field == "media.frames[1]"
