"""Every mode of Pillow → RGB, by one rule: what is transparent lies over white, what is deep is scaled.

Pillow's own conversion turns clear pixels black, clips 16-bit values at 255, and refuses some modes.
"""

import math

import numpy as np
from PIL import Image, ImageCms

from shared.errors import InvalidMedia

WHITE = (255, 255, 255)

_WITH_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
_DEEP = ("I", "F")
_FULL_16_BIT = 65535.0
_BAND_ROWS = 256


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as it would look on white paper."""
    if image.mode.startswith("I;16") or image.mode in _DEEP:
        image = _from_deep(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        return _over_white(image)
    if image.mode == "LAB":
        return _from_lab(image)
    return image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode in ("La", "RGBa"):
        # Premultiplied modes convert to their plain counterparts only.
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    rgba = image.convert("RGBA")
    paper = Image.new("RGB", rgba.size, WHITE)
    paper.paste(rgba, mask=rgba.getchannel("A"))
    return paper


def _from_lab(image: Image.Image) -> Image.Image:
    srgb = ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, ImageCms.createProfile("LAB"), srgb, outputMode="RGB")
    assert converted is not None  # only a conversion in place returns nothing
    return converted


def _from_deep(image: Image.Image) -> Image.Image:
    """A grey picture of more than 8 bits as L, or as LA where one of its values means clear."""
    values = np.asarray(image)
    low, high = _range(image.mode, float(values.min()), float(values.max()))
    grey = np.empty(values.shape, np.uint8)
    for first in range(0, len(values), _BAND_ROWS):  # in bands: a float copy of the whole is eight times it
        band = values[first : first + _BAND_ROWS].astype(np.float64)
        grey[first : first + _BAND_ROWS] = np.rint((band - low) * (255.0 / (high - low)))
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return Image.fromarray(grey)
    alpha = np.where(values == clear, 0, 255).astype(np.uint8)
    return Image.merge("LA", (Image.fromarray(grey), Image.fromarray(alpha)))


def _range(mode: str, low: float, high: float) -> tuple[float, float]:
    """Which values are black and white: the scale that they are on, or their own range on none.

    Integers are on the scale of 8 or of 16 bits, floats on that of 0 to 1 or of 0 to 255.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InvalidMedia("the picture holds values that are not finite", field="media.data")
    if mode.startswith("I;16"):
        return 0.0, _FULL_16_BIT
    for white in (255.0, _FULL_16_BIT) if mode == "I" else (1.0, 255.0):
        if low >= 0.0 and high <= white:
            return 0.0, white
    # Equal values outside every scale: as black as the lowest of a range.
    return low, max(high, math.nextafter(low, math.inf))
