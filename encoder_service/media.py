"""Bytes → checked RGB picture. The security boundary: nothing but bytes is opened here, no path, no URL.

Limits are checked on the header, before any pixel is decoded. Whatever a codec raises is bad input. What a
file says about colour profiles is ignored; its EXIF orientation is applied; transparency is laid over white.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import ExifTags, Image, UnidentifiedImageError

from encoder_service.rgb import to_rgb
from shared.errors import InvalidMedia, LenspairError, MediaTooLarge

FIELD = "media.data"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_ASPECT_RATIO = 200
# Part of every key's namespace: raise the version when the same file may give other pixels.
RULES = "upright-over-white/1"

_PILLOW_MODULES = r"PIL\."
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The largest media that are looked at: encoded bytes, and pixels as the header declares them."""

    max_bytes: int
    max_pixels: int
    max_side: int


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """What a file says about itself. The sides may be swapped by its orientation."""

    format: str
    width: int
    height: int


def load_codecs() -> None:
    """Pillow imports its codecs on first use; a server wants that behind it."""
    Image.init()


def check_size(size_bytes: int, limits: MediaLimits) -> None:
    """Refuses a number of bytes, sent or only declared.

    Raises:
        InvalidMedia: there are none.
        MediaTooLarge: there are too many.
    """
    if size_bytes < 1:
        raise InvalidMedia("the media is empty", field=FIELD)
    if size_bytes > limits.max_bytes:
        raise MediaTooLarge(
            f"{size_bytes} bytes are more than the limit of {limits.max_bytes}",
            field=FIELD,
            limit="max_media_bytes",
            value=str(limits.max_bytes),
        )


def read_header(data: bytes, limits: MediaLimits) -> PictureHeader:
    """Reads what the file declares and checks it; decodes no pixel.

    Raises:
        InvalidMedia: not a picture in one of the FORMATS, or one side is over 200 times the other.
        MediaTooLarge: more bytes, pixels or a longer side than the limits allow.
    """
    check_size(len(data), limits)
    with _codec(limits), _opened(data, limits) as image:
        return _checked_header(image, limits)


def decode(data: bytes, limits: MediaLimits) -> Image.Image:
    """The first picture of a file, upright and in RGB.

    Raises:
        InvalidMedia: not a picture, damaged, or cut off.
        MediaTooLarge: as `read_header`.
    """
    check_size(len(data), limits)
    with _codec(limits), _opened(data, limits) as image:
        header = _checked_header(image, limits)
        image.load()
        if sorted(image.size) != sorted((header.width, header.height)):
            raise InvalidMedia("the picture does not have the size that it declares", field=FIELD)
        return to_rgb(_upright(image))


@contextmanager
def _codec(limits: MediaLimits) -> Iterator[None]:
    """Turns everything that a codec raises into an error for the caller."""
    _silence_pillow()
    try:
        yield
    except LenspairError:
        raise
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except UnidentifiedImageError:
        raise InvalidMedia(f"not a picture in {', '.join(FORMATS)}", field=FIELD) from None
    except Exception as error:
        raise InvalidMedia("the picture is damaged or cut off", field=FIELD) from error


@contextmanager
def _opened(data: bytes, limits: MediaLimits) -> Iterator[Image.Image]:
    # Some codecs allocate while they open; Pillow's own guard must not be laxer than ours then.
    Image.MAX_IMAGE_PIXELS = limits.max_pixels
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        yield image


def _checked_header(image: Image.Image, limits: MediaLimits) -> PictureHeader:
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidMedia("the picture has no pixels", field=FIELD)
    if width * height > limits.max_pixels:
        raise _too_many_pixels(limits)
    if max(width, height) > limits.max_side:
        raise MediaTooLarge(
            f"a side of {max(width, height)} pixels is longer than the limit of {limits.max_side}",
            field=FIELD,
            limit="max_source_side",
            value=str(limits.max_side),
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidMedia(
            f"{width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other", field=FIELD
        )
    return PictureHeader(image.format or "", width, height)


def _upright(image: Image.Image) -> Image.Image:
    """Applies the EXIF orientation. Unreadable EXIF says nothing, so the picture stays as it is."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001  the parser raises whatever it stumbles over
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _too_many_pixels(limits: MediaLimits) -> MediaTooLarge:
    return MediaTooLarge(
        f"the picture has more than {limits.max_pixels} pixels",
        field=FIELD,
        limit="max_source_pixels",
        value=str(limits.max_pixels),
    )


def _silence_pillow() -> None:
    """Pillow warns about harmless oddities of files; what matters, it raises or we check.

    `catch_warnings` is not thread-safe; a filter that is only ever added is.
    """
    known = (getattr(module, "pattern", None) for _, _, _, module, _ in warnings.filters)
    if _PILLOW_MODULES not in known:
        warnings.filterwarnings("ignore", module=_PILLOW_MODULES)
