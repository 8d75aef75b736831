"""Video files to frames: what is chosen, its times, its size; and what is refused."""

import io
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from encoder_service.clip import ClipLimits, Frames, decode_clip, read_clip_header
from encoder_service.sampling import Sampling
from shared.errors import InvalidMedia, MediaTooLarge
from tests.clips import counted_frames, video

LIMITS = ClipLimits(max_pixels=1_000_000, max_side=2000, max_seconds=60, max_frames=500)
EVERYTHING = Sampling(None, None, 4, 768)
KINDS: dict[str, Any] = {
    "mp4": {"container": "mp4", "codec": "libx264"},
    "webm": {"container": "webm", "codec": "libvpx-vp9"},
    "avi": {"container": "avi", "codec": "mpeg4", "pixels": "yuv420p", "qmax": "2"},
    "gif": {"container": "gif", "codec": "gif", "pixels": "rgb8"},
}


def decoded(
    data: bytes,
    sampling: Sampling = EVERYTHING,
    size: tuple[int, int] = (96, 64),
    limits: ClipLimits = LIMITS,
) -> Frames:
    return decode_clip(data, limits, sampling, size, read_clip_header(data, limits).times)


def green_columns(frames: Frames) -> list[int]:
    """How far the green of counted_frames reaches, frame by frame."""
    return [int((frame[32, :, 1] > 128).sum()) for frame in frames.pixels]


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_comes_in_its_order_with_its_time(kind: str) -> None:
    data = video(counted_frames(20), fps=10, **KINDS[kind])
    header = read_clip_header(data, LIMITS)
    assert (header.width, header.height) == (96, 64)
    assert header.times == pytest.approx([n / 10 for n in range(20)], abs=0.005)
    frames = decoded(data)
    assert frames.pixels.shape == (20, 64, 96, 3)
    assert frames.pixels.dtype == np.uint8
    assert green_columns(frames) == pytest.approx(range(20), abs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_frames_are_those_that_were_asked_for(kind: str) -> None:
    data = video(counted_frames(20), fps=10, **KINDS[kind])
    frames = decoded(data, Sampling(None, 3, 4, 768))
    assert frames.times == pytest.approx([0, 1.0, 1.9], abs=0.005)
    assert green_columns(frames) == pytest.approx([0, 10, 19], abs=2)


def test_frames_are_resized_once_by_the_rule_of_pictures() -> None:
    data = video(counted_frames(4), **KINDS["mp4"])
    whole, half = decoded(data), decoded(data, size=(48, 32))
    want = [Image.fromarray(frame).resize((48, 32), Image.Resampling.BICUBIC) for frame in whole.pixels]
    assert (half.pixels == np.stack([np.asarray(each) for each in want])).all()


def test_one_frame_is_a_clip() -> None:
    """I27."""
    frames = decoded(video(counted_frames(1)))
    assert (len(frames.pixels), frames.times) == (1, (0.0,))


@pytest.mark.parametrize("kind", ["webm", "avi", "gif"])
def test_a_clip_that_is_cut_off_ends_where_it_is_cut(kind: str) -> None:
    """I31: what can be decoded is used, and chosen among."""
    data = video(counted_frames(40), fps=10, **KINDS[kind])
    cut = data[: len(data) * 4 // 5]
    header = read_clip_header(cut, LIMITS)
    assert len(header.times) < 40
    frames = decoded(cut, Sampling(None, 4, 4, 768))
    assert len(frames.pixels) == 4
    assert frames.times[-1] < 3.9
    assert green_columns(frames)[-1] == pytest.approx(10 * frames.times[-1], abs=2)


def test_a_header_that_promises_too_many_frames_is_corrected() -> None:
    """I31."""
    data = video(counted_frames(9), fps=9)
    promised = [n / 9 for n in range(1227)]
    frames = decode_clip(data, LIMITS, Sampling(None, 4, 4, 768), (96, 64), promised)
    assert green_columns(frames) == pytest.approx([0, 3, 5, 8], abs=2)


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_phone_held_otherwise_is_turned_upright(rotation: int) -> None:
    """I06: the header has the upright size, and frames are turned counterclockwise by so many degrees."""
    file = io.BytesIO()
    frames = counted_frames(4)
    frames[3].paste((0, 0, 255), (0, 0, 96, 16))  # a blue band at the top
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=4, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv444p"
        stream.set_display_rotation(rotation)
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        output.mux(stream.encode())
    header = read_clip_header(file.getvalue(), LIMITS)
    assert (header.width, header.height) == ((64, 96) if rotation != 180 else (96, 64))
    last = decoded(file.getvalue(), size=(header.width, header.height)).pixels[3]
    blue = last[..., 2] > 128
    side = {90: blue[:, :16], 180: blue[-16:], 270: blue[:, -16:]}[rotation]
    assert side.mean() > 0.9
    assert blue.sum() < 1.2 * side.size


def test_what_is_clear_lies_over_white() -> None:
    """I01: a GIF whose background is clear."""
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (0, 0, 32, 64))
    file = io.BytesIO()
    clear.save(file, "GIF", save_all=True, append_images=[clear.transpose(Image.Transpose.ROTATE_180)])
    frames = decoded(file.getvalue(), size=(64, 64))
    assert frames.pixels[0, 32, 60].tolist() == [255, 255, 255]
    assert frames.pixels[0, 32, 3].tolist() == pytest.approx([255, 0, 0], abs=8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 100,
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\0\0\0\0AVI ",
        b"GIF89a",
        b"\x1a\x45\xdf\xa3" + bytes(100),
        b"\0\0\0\x18ftypmp42" + bytes(1000),
    ],
    ids=["nothing", "no clip", "a playlist", "a list of files", "avi", "gif", "webm", "mp4"],
)
def test_what_is_no_clip_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia):
        read_clip_header(data, LIMITS)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (ClipLimits(96 * 64 - 1, 2000, 60, 500), "max_source_pixels"),
        (ClipLimits(1_000_000, 95, 60, 500), "max_source_pixels"),
        (ClipLimits(1_000_000, 2000, 1, 500), "max_clip_seconds"),
        (ClipLimits(1_000_000, 2000, 60, 19), "max_clip_source_frames"),
    ],
)
def test_limits_are_named(limits: ClipLimits, limit: str) -> None:
    with pytest.raises(MediaTooLarge) as caught:
        read_clip_header(video(counted_frames(20), fps=10), limits)
    assert caught.value.metadata["limit"] == limit
