"""Bytes to RGB: what people send, what files declare, and what is no picture at all."""

import io
import struct
import warnings

import numpy as np
import psutil
import pytest
from PIL import Image, ImageCms

from encoder_service.media import FORMATS, MediaLimits, check_size, decode, read_header
from shared.errors import InvalidMedia, InvalidRequest, MediaTooLarge
from tests.unit.encoder.samples import LIMITS, declared_png, encoded, noise, pixels, solid

LOSSLESS = {"WEBP": {"lossless": True}}
TRANSPOSED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def opened(data: bytes) -> Image.Image:
    return decode(data, LIMITS)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_come_out_as_they_went_in(file_format: str) -> None:
    picture = noise()
    got = opened(encoded(picture, file_format, **LOSSLESS.get(file_format, {})))
    assert got.mode == "RGB"
    assert (pixels(got) == pixels(picture)).all()


@pytest.mark.parametrize("file_format", ["JPEG", "GIF"])
def test_lossy_formats_come_out_nearly_so(file_format: str) -> None:
    picture = Image.new("RGB", (48, 32), (200, 30, 60))
    got = opened(encoded(picture, file_format))
    assert np.abs(pixels(got) - pixels(picture)).max() <= 8


def test_of_an_animated_gif_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    got = opened(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert got.getpixel((10, 10)) == (255, 0, 0)


# I01
def test_what_is_clear_lies_over_white() -> None:
    picture = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (22, 22, 42, 42))
    got = opened(encoded(picture))
    assert got.getpixel((0, 0)) == (255, 255, 255)
    assert got.getpixel((30, 30)) == (0, 0, 0)
    assert (pixels(got) == 0).sum() == 20 * 20 * 3


# I03
def test_a_clear_palette_entry_lies_over_white() -> None:
    picture = Image.new("P", (16, 16), 0)
    picture.putpalette([9, 9, 9, 200, 0, 0])
    picture.paste(1, (0, 0, 8, 16))
    got = opened(encoded(picture, transparency=0))
    assert (got.getpixel((2, 2)), got.getpixel((12, 2))) == ((200, 0, 0), (255, 255, 255))


# I03
def test_grey_with_alpha_is_blended() -> None:
    alpha = Image.fromarray(np.tile(np.arange(0, 256, 8, dtype=np.uint8), (32, 1)))
    picture = Image.merge("LA", (Image.new("L", (32, 32), 128), alpha))
    got = pixels(opened(encoded(picture)))
    want = 255 - (255 - 128) * np.arange(0, 256, 8) / 255
    assert got.shape == (32, 32, 3)
    assert np.abs(got - want[None, :, None]).max() <= 1


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_one_clear_colour_lies_over_white(mode: str) -> None:
    picture = Image.new(mode, (8, 8), 0)
    clear = (0, 0, 0) if mode == "RGB" else 0
    got = opened(encoded(picture, transparency=clear))
    assert got.getpixel((4, 4)) == (255, 255, 255)


def test_one_clear_value_of_sixteen_bits_lies_over_white() -> None:
    values = np.array([[1000, 60000], [1000, 0]], np.uint16)
    got = pixels(opened(encoded(Image.fromarray(values), transparency=1000)))[..., 0]
    assert got.tolist() == [[255, round(60000 / 257)], [255, 0]]


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(file_format: str) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    got = pixels(opened(encoded(Image.fromarray(values), file_format)))
    assert np.abs(got[..., 0] - np.arange(256).reshape(16, 16)).max() <= 1


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([-10.0, 0.0, 10.0], [0, 128, 255]),
        ([7e5, 7e5, 7e5], [0, 0, 0]),
    ],
)
def test_floats_are_on_their_scale(values: list[float], want: list[int]) -> None:
    data = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert pixels(opened(data))[0, :, 0].tolist() == want


@pytest.mark.parametrize(("values", "want"), [([0, 7, 255], [0, 7, 255]), ([0, 32768, 65535], [0, 128, 255])])
def test_wide_integers_are_on_their_scale(values: list[int], want: list[int]) -> None:
    data = encoded(Image.fromarray(np.array([values], np.int32)), "TIFF")
    assert pixels(opened(data))[0, :, 0].tolist() == want


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_floats_that_are_not_finite_are_refused(bad: float) -> None:
    data = encoded(Image.fromarray(np.array([[0.0, bad]], np.float32)), "TIFF")
    with pytest.raises(InvalidMedia, match="finite"):
        opened(data)


@pytest.mark.parametrize(
    ("mode", "file_format"), [("1", "PNG"), ("L", "PNG"), ("P", "PNG"), ("CMYK", "TIFF"), ("CMYK", "JPEG")]
)
def test_other_modes_end_as_rgb(mode: str, file_format: str) -> None:
    picture = noise().convert(mode)
    got = opened(encoded(picture, file_format))
    assert got.mode == "RGB"
    want = pixels(picture.convert("RGB"))
    assert np.abs(pixels(got) - want).mean() < (30 if file_format == "JPEG" else 1)


def test_lab_keeps_its_colours() -> None:
    picture = Image.new("RGB", (8, 8), (200, 40, 90))
    to_lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(picture, *to_lab, outputMode="LAB")
    assert lab is not None
    assert np.abs(pixels(opened(encoded(lab, "TIFF"))) - pixels(picture)).max() <= 3


# I06
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_everywhere(file_format: str, orientation: int) -> None:
    picture = Image.new("RGB", (24, 16), "white")
    picture.paste((255, 0, 0), (0, 0, 8, 16))
    picture.paste((0, 255, 0), (8, 8, 24, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if file_format == "JPEG" else LOSSLESS.get(file_format, {})
    got = opened(encoded(picture, file_format, exif=exif, **options))
    method = TRANSPOSED[orientation]
    want = picture if method is None else picture.transpose(method)
    assert got.size == want.size
    assert np.abs(pixels(got) - pixels(want)).max() <= 12


# I07
@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0" + bytes(range(8)), b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"],
)
def test_malformed_exif_says_nothing(exif: bytes) -> None:
    data = encoded(noise(64, 64), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    with_exif = data[:2] + segment + data[2:]
    assert (pixels(opened(with_exif)) == pixels(opened(data))).all()


@pytest.mark.parametrize("value", [0, 9, 255])
def test_an_orientation_that_is_none_says_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert opened(encoded(noise(24, 16), "PNG", exif=exif)).size == (24, 16)


# I09
@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("missing", [40, 128, 0.5])
def test_a_picture_that_is_cut_off_is_refused(file_format: str, missing: float) -> None:
    data = encoded(noise(), file_format)
    kept = len(data) - missing if missing > 1 else len(data) * missing
    with pytest.raises(InvalidMedia):
        opened(data[: int(kept)])


# I20, I24
@pytest.mark.parametrize(
    "data",
    [
        b"/etc/hostname",
        b"../x.png",
        b"file:///etc/hostname",
        b"data:image/png,AAAA",
        b"data:;base64,",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"BM",
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"II*\0\x08\0\0\0",
        b"\xff\xd8\xff",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        bytes(1000),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    for look in (read_header, decode):
        with pytest.raises(InvalidMedia):
            look(data, LIMITS)


def test_formats_beyond_the_list_are_refused() -> None:
    for file_format in ("PPM", "ICO", "TGA", "JPEG2000", "AVIF", "PDF"):
        with pytest.raises(InvalidMedia, match="not a picture"):
            opened(encoded(noise(), file_format))


def test_nothing_is_not_a_picture() -> None:
    with pytest.raises(InvalidMedia, match="empty"):
        opened(b"")


def test_too_many_bytes_are_refused_with_the_limit() -> None:
    check_size(LIMITS.max_bytes, LIMITS)
    with pytest.raises(MediaTooLarge, match=str(LIMITS.max_bytes)) as caught:
        check_size(LIMITS.max_bytes + 1, LIMITS)
    assert caught.value.metadata["limit"] == "max_media_bytes"


# I12
@pytest.mark.parametrize("size", [(1093, 5), (201, 1), (1, 201), (5, 1093)])
def test_a_strip_over_200_to_1_is_refused_by_its_header(size: tuple[int, int]) -> None:
    truncated = encoded(Image.new("RGB", size))[:60]
    with pytest.raises(InvalidMedia, match="200 times"):
        read_header(truncated, LIMITS)


@pytest.mark.parametrize("size", [(200, 1), (1, 200), (1000, 5)])
def test_a_strip_of_exactly_200_to_1_passes(size: tuple[int, int]) -> None:
    assert opened(encoded(Image.new("RGB", size))).size == size


# I17
@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (12_000, 12_000), (64_001, 1_000)])
def test_a_decompression_bomb_costs_nothing(width: int, height: int) -> None:
    bomb = declared_png(width, height)
    before = psutil.Process().memory_info().rss
    for look in (read_header, decode):
        with pytest.raises(MediaTooLarge) as caught:
            look(bomb, LIMITS)
        assert caught.value.metadata["value"] == str(LIMITS.max_pixels)
    assert psutil.Process().memory_info().rss - before < 50_000_000


def test_a_webp_bomb_costs_nothing() -> None:
    # A canvas of 16,384 x 16,384, which Pillow's decoder would allocate when it opens the file.
    frame = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\0" * 2
    bomb = b"RIFF" + struct.pack("<I", 4 + len(frame)) + b"WEBP" + frame
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequest):
        opened(bomb)
    assert psutil.Process().memory_info().rss - before < 50_000_000


def test_a_limit_above_pillows_own_counts() -> None:
    generous = MediaLimits(max_bytes=10**7, max_pixels=200_000_000, max_side=32_768)
    assert read_header(declared_png(12_000, 12_000), generous).width == 12_000
    with pytest.raises(MediaTooLarge):
        read_header(declared_png(12_000, 12_000), LIMITS)


def test_a_long_side_is_refused() -> None:
    narrow = MediaLimits(max_bytes=10**6, max_pixels=10**8, max_side=100)
    with pytest.raises(MediaTooLarge, match="101"):
        read_header(solid("red", 101, 20), narrow)


def test_pillow_never_warns_through_us() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        palette = Image.new("P", (4, 4))
        palette.putpalette([1, 2, 3] * 4)
        palette.save(file, "PNG", transparency=bytes([0, 128, 255, 9]))
        opened(file.getvalue())
