"""Clips for tests: the demonstration's own as files and lists of frames, and files made on the spot."""

import io
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from PIL import Image

from demo.asking import Conversation, as_conversation
from demo.curriculum import held_out
from lenspair_client import Clip


def demo_clip(kind: str, index: int, seed: int = 11) -> Conversation:
    """A held-out clip that the demonstration checkpoint can be asked about ("motion" or "order")."""
    return as_conversation(held_out(kind, index, seed))


def as_frames(conversation: Conversation) -> Clip:
    """The frames as PNG, with their times."""
    frames = tuple(png(frame) for frame in conversation.frames)
    return Clip(frames=frames, timestamps=tuple(n / conversation.fps for n in range(len(frames))))


def as_file(conversation: Conversation) -> Clip:
    """The frames in an MP4 of their own rate, hardly compressed."""
    return Clip(file=video(conversation.frames, fps=conversation.fps))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def video(
    frames: Sequence[Image.Image],
    *,
    fps: float = 10,
    container: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv444p",
    **options: str,
) -> bytes:
    """An encoded clip of these frames, at an even rate."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=round(fps), options={"crf": "4", **options})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = pixels
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def counted_frames(count: int, size: tuple[int, int] = (96, 64)) -> list[Image.Image]:
    """Frames that differ: number n is green in its first n columns, and the redder the later it is."""
    frames = []
    for number in range(count):
        values = np.zeros((size[1], size[0], 3), np.uint8)
        values[..., 0] = number % 25 * 10
        values[:, : number % size[0]] = (0, 255, 0)
        frames.append(Image.fromarray(values))
    return frames
