"""Bytes of a video file → chosen frames in RGB. Runs in an isolated process (see media_worker.py).

Nothing but bytes is opened: which demuxer reads them is decided here, by their first bytes, so that no
playlist or other format that names further files is ever looked into. Frames are turned upright, what is
transparent lies over white, and each is resized once, to the size that the caller has found.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from encoder_service.media import FIELD, MAX_ASPECT_RATIO
from encoder_service.rgb import to_rgb
from encoder_service.sampling import Sampling, choose_frames
from shared.errors import InvalidMedia, LenspairError, MediaTooLarge

CONTAINERS = ("MP4", "WebM", "AVI", "GIF")
_UPRIGHT = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """The largest clips that are looked at: per frame in pixels, and all of it in seconds and frames."""

    max_pixels: int
    max_side: int
    max_seconds: float
    max_frames: int


@dataclass(frozen=True, slots=True)
class ClipHeader:
    """What there is to choose from: the upright size, and the time of each frame from the first on."""

    width: int
    height: int
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Frames:
    """Chosen frames `[count, height, width, 3]` (uint8, RGB) and their times in seconds."""

    pixels: NDArray[np.uint8]
    times: tuple[float, ...]


def read_clip_header(data: bytes | bytearray | memoryview, limits: ClipLimits) -> ClipHeader:
    """Reads the first frame and the times of all; decodes no other frame.

    Raises:
        InvalidMedia: no clip in one of the CONTAINERS, or none with a picture in it.
        MediaTooLarge: a larger frame, more frames or seconds than the limits allow.
    """
    with _codec():
        with _opened(data) as (container, stream):
            _check_size(stream.codec_context.width, stream.codec_context.height, limits)
            first = next(container.decode(stream), None)
            if first is None:
                raise InvalidMedia("the clip has no frames", field=FIELD)
            _check_size(first.width, first.height, limits)
            width, height = _upright_size(first)
        with _opened(data) as (container, stream):
            times = _times(container, stream, limits)
        return ClipHeader(width, height, times)


def decode_clip(
    data: bytes | bytearray | memoryview,
    limits: ClipLimits,
    sampling: Sampling,
    size: tuple[int, int],
    times: Sequence[float],
) -> Frames:
    """The frames that the sampling chooses, each of `size` (width, height).

    `times` are those of the header. Where fewer frames can be decoded than it promises, the choice is made
    among those that can.

    Raises: as `read_clip_header`.
    """
    with _codec():
        for _ in range(2):
            chosen = choose_frames(times, sampling)
            frames, decoded = _decode(data, limits, chosen, size)
            if len(frames) == len(chosen):
                return Frames(np.stack(frames), tuple(times[number] for number in chosen))
            if not decoded:
                break
            times = times[:decoded]
        raise InvalidMedia("the clip is damaged or cut off", field=FIELD)


def _decode(
    data: bytes | bytearray | memoryview, limits: ClipLimits, chosen: Sequence[int], size: tuple[int, int]
) -> tuple[list[NDArray[np.uint8]], int]:
    """The chosen frames that are there, and how many frames were seen."""
    wanted = set(chosen)
    frames: list[NDArray[np.uint8]] = []
    seen = 0
    with _opened(data) as (container, stream):
        for frame in _until_damaged(container.decode(stream)):
            if seen in wanted:
                _check_size(frame.width, frame.height, limits)
                frames.append(np.asarray(_rgb(frame).resize(size, Image.Resampling.BICUBIC)))
            seen += 1
            if seen > chosen[-1]:
                break
    return frames, seen


def _until_damaged(frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
    """What can be decoded: a clip that is cut off ends where it is cut."""
    while True:
        try:
            frame = next(frames, None)
        except av.error.FFmpegError:
            return
        if frame is None:
            return
        yield frame


def _times(container: InputContainer, stream: VideoStream, limits: ClipLimits) -> tuple[float, ...]:
    stamps: list[float | None] = []
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        has_time = packet.pts is not None and packet.time_base is not None
        stamps.append(float(packet.pts * packet.time_base) if has_time else None)  # type: ignore[operator]
        if len(stamps) > limits.max_frames:
            raise MediaTooLarge(
                f"the clip has more than {limits.max_frames} frames",
                field=FIELD,
                limit="max_clip_source_frames",
                value=str(limits.max_frames),
            )
    if not stamps:
        raise InvalidMedia("the clip has no frames", field=FIELD)
    times = sorted(each for each in stamps if each is not None)
    if len(times) < len(stamps) or any(earlier == later for earlier, later in pairwise(times)):
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        if rate <= 0:
            raise InvalidMedia("the clip does not say when its frames are shown", field=FIELD)
        times = [number / rate for number in range(len(stamps))]
    times = [each - times[0] for each in times]
    if times[-1] > limits.max_seconds:
        raise MediaTooLarge(
            f"the clip is {times[-1]:.0f} seconds long, the limit is {limits.max_seconds:.0f}",
            field=FIELD,
            limit="max_clip_seconds",
            value=f"{limits.max_seconds:.0f}",
        )
    return tuple(times)


@contextmanager
def _opened(data: bytes | bytearray | memoryview) -> Iterator[tuple[InputContainer, VideoStream]]:
    demuxer = _demuxer(bytes(data[:16]))
    with av.open(io.BytesIO(data), format=demuxer, metadata_errors="replace") as container:
        if not container.streams.video:
            raise InvalidMedia("the clip has no pictures in it", field=FIELD)
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # a process of its own is what this has; its memory is limited
        yield container, stream


def _demuxer(start: bytes) -> str:
    known: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
        ("mp4", lambda start: start[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip")),
        ("matroska", lambda start: start.startswith(b"\x1a\x45\xdf\xa3")),
        ("avi", lambda start: start.startswith(b"RIFF") and start[8:12] == b"AVI "),
        ("gif", lambda start: start.startswith((b"GIF87a", b"GIF89a"))),
    )
    for name, is_it in known:
        if is_it(start):
            return name
    raise InvalidMedia(f"not a clip in {', '.join(CONTAINERS)}", field=FIELD)


@contextmanager
def _codec() -> Iterator[None]:
    """Turns everything that a codec raises into an error for the caller."""
    av.logging.set_level(av.logging.PANIC)
    try:
        yield
    except LenspairError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidMedia("the clip is damaged or cut off", field=FIELD) from error


def _check_size(width: int, height: int, limits: ClipLimits) -> None:
    if width < 1 or height < 1:
        raise InvalidMedia("the clip's frames have no pixels", field=FIELD)
    if width * height > limits.max_pixels or max(width, height) > limits.max_side:
        raise MediaTooLarge(
            f"frames of {width}x{height} are more than {limits.max_pixels} pixels "
            f"or longer than {limits.max_side} on a side",
            field=FIELD,
            limit="max_source_pixels",
            value=str(limits.max_pixels),
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMedia(
            f"{width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other", field=FIELD
        )


def _upright_size(frame: VideoFrame) -> tuple[int, int]:
    return (frame.height, frame.width) if frame.rotation % 180 else (frame.width, frame.height)


def _rgb(frame: VideoFrame) -> Image.Image:
    has_alpha = any(component.is_alpha for component in frame.format.components)
    values = frame.to_ndarray(format="rgba" if has_alpha or frame.format.name == "pal8" else "rgb24")
    image = to_rgb(Image.fromarray(values))
    method = _UPRIGHT.get(frame.rotation % 360)
    return image if method is None else image.transpose(method)
