"""Which frames are looked at, and when: as Transformers' video processor and processor have it."""

import pytest
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from encoder_service.sampling import Sampling, choose_frames, patch_times, patches_of


def evenly(count: int, fps: float) -> list[float]:
    return [number / fps for number in range(count)]


@pytest.mark.parametrize("wanted", [0.5, 1.0, 2.0, 7.0, 60.0])
@pytest.mark.parametrize("fps", [1.0, 10.0, 24.0, 29.97])
@pytest.mark.parametrize("count", [2, 3, 9, 100, 1227])
def test_frames_by_rate_are_those_of_the_processor(count: int, fps: float, wanted: float) -> None:
    processor = Qwen3VLVideoProcessor()
    metadata = VideoMetadata(total_num_frames=count, fps=fps)
    theirs = processor.sample_frames(metadata, fps=wanted).tolist()
    sampling = Sampling(wanted, None, processor.min_frames, processor.max_frames)
    assert choose_frames(evenly(count, fps), sampling) == theirs


# I26, I27, I28, I30: how many frames are asked for and there, and what is looked at
@pytest.mark.parametrize(
    ("count", "wanted", "chosen"),
    [(9, 16, 9), (9, 4, 4), (1, 4, 1), (20, 1, 1), (5, 5, 5)],
)
def test_frames_by_number_are_never_more_than_there_are(count: int, wanted: int, chosen: int) -> None:
    frames = choose_frames(evenly(count, 2), Sampling(None, wanted, 4, 768))
    assert len(frames) == len(set(frames)) == chosen
    assert frames[0] == 0
    assert chosen == 1 or frames[-1] == count - 1


def test_without_a_wish_all_frames_are_looked_at() -> None:
    assert choose_frames(evenly(7, 2), Sampling(None, None, 4, 768)) == list(range(7))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_times_of_patches_are_those_of_the_processor(count: int) -> None:
    """I26, I33: a patch's mean; an odd clip repeats its last frame."""
    theirs = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), 2.0, 2)
    assert list(patch_times(evenly(count, 2.0))) == theirs
    assert len(theirs) == patches_of(count)


def test_times_of_frames_a_second_apart() -> None:
    """I33."""
    assert patch_times(evenly(8, 1.0)) == (0.5, 2.5, 4.5, 6.5)
