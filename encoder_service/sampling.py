"""Which frames of a clip are looked at, and what time each temporal patch gets. Pure.

The choice is that of Transformers' `Qwen3VLVideoProcessor.sample_frames`, evenly over the frames that there
are, and the times are those of its processor: the mean of a patch's first and last frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TEMPORAL_PATCH = 2
"""Frames of one temporal patch; an odd clip repeats its last frame."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames: `fps` a second, or `num_frames`, or with neither all of them.

    By `fps` there are at least `min_frames` and at most `max_frames`; never more than the clip has.
    """

    fps: float | None
    num_frames: int | None
    min_frames: int
    max_frames: int


def choose_frames(times: Sequence[float], sampling: Sampling) -> list[int]:
    """The numbers of the frames to look at, rising. `times` are those of all frames, in seconds."""
    count = _count(times, sampling)
    if count == 1:
        return [0]
    step = (len(times) - 1) / (count - 1)
    return [round(number * step) for number in range(count)]


def patch_times(times: Sequence[float]) -> tuple[float, ...]:
    """The time of each temporal patch of frames with these times."""
    padded = [*times, *times[-1:]] if len(times) % TEMPORAL_PATCH else list(times)
    firsts, lasts = padded[::TEMPORAL_PATCH], padded[TEMPORAL_PATCH - 1 :: TEMPORAL_PATCH]
    return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def patches_of(num_frames: int) -> int:
    """Temporal patches of so many frames."""
    return -(-num_frames // TEMPORAL_PATCH)


def _count(times: Sequence[float], sampling: Sampling) -> int:
    if sampling.num_frames is not None:
        return min(sampling.num_frames, len(times))
    if sampling.fps is None:
        return len(times)
    wanted = int(_duration(times) * sampling.fps + 1e-6)  # what rounding took from a whole number
    return min(max(wanted, sampling.min_frames), sampling.max_frames, len(times))


def _duration(times: Sequence[float]) -> float:
    """Seconds, the time of the last frame included: it is shown as long as the others on average."""
    if len(times) == 1:
        return 0.0
    return (times[-1] - times[0]) * len(times) / (len(times) - 1)
