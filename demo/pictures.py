"""Owns what a synthetic picture is and how it is drawn; knows nothing of questions or of models."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Rgb = tuple[int, int, int]

# Two anchors a colour: a muted one and the one that people type by name.
COLOURS: dict[str, tuple[Rgb, Rgb]] = {
    "red": ((220, 40, 40), (255, 0, 0)),
    "green": ((40, 160, 70), (0, 128, 0)),
    "blue": ((40, 80, 220), (0, 0, 255)),
    "yellow": ((245, 222, 40), (255, 255, 0)),
    "purple": ((140, 50, 180), (128, 0, 128)),
    "orange": ((245, 130, 30), (255, 165, 0)),
    "cyan": ((60, 200, 220), (0, 255, 255)),
    "black": ((28, 28, 28), (0, 0, 0)),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple("0123456789")
ZONES: dict[str, tuple[float, float]] = {
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "middle": (0.5, 0.5),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing on a picture: a shape or a digit. Lengths are in pixels of the picture as drawn."""

    what: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    radius: float
    tilt: float = 0.0
    zone: str | None = None

    @property
    def name(self) -> str:
        return f"{self.colour} {self.what}"


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that decides the pixels; `draw` is a pure function of it."""

    width: int
    height: int
    background: Rgb
    marks: tuple[Mark, ...]
    smooth: bool = False
    noise: float = 0.0
    noise_seed: int = 0
    jpeg_quality: int | None = None

    def with_marks(self, marks: tuple[Mark, ...]) -> Picture:
        return replace(self, marks=marks)


def shade(colour: str, rng: random.Random) -> Rgb:
    """A shade that still deserves the colour's name."""
    red, green, blue = rng.choice(COLOURS[colour])
    return (_near(red, rng), _near(green, rng), _near(blue, rng))


def _near(value: int, rng: random.Random) -> int:
    return min(255, max(0, value + rng.randint(-12, 12)))


def draw(picture: Picture) -> Image.Image:
    """The picture as RGB, with its noise and its JPEG damage."""
    scale = 2 if picture.smooth else 1
    size = (picture.width * scale, picture.height * scale)
    image = Image.new("RGB", size, picture.background)
    pen = ImageDraw.Draw(image)
    for mark in picture.marks:
        _draw_mark(pen, mark, scale)
    if picture.smooth:
        image = image.reduce(2)
    return _as_file(_noisy(image, picture), picture.jpeg_quality)


def _draw_mark(pen: ImageDraw.ImageDraw, mark: Mark, scale: int) -> None:
    x, y, radius = mark.x * scale, mark.y * scale, mark.radius * scale
    if mark.what in DIGITS:
        font = _font(round(2 * radius))
        pen.text((x, y), mark.what, fill=mark.rgb, font=font, anchor="mm", stroke_width=scale / 2)
    elif mark.what == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=mark.rgb)
    else:
        pen.polygon(_outline(mark.what, x, y, radius, mark.tilt), fill=mark.rgb)


@lru_cache(maxsize=256)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _outline(shape: str, x: float, y: float, radius: float, tilt: float) -> list[tuple[float, float]]:
    cos, sin = math.cos(tilt), math.sin(tilt)
    corners = _UNIT_OUTLINES[shape]
    return [(x + radius * (u * cos - v * sin), y + radius * (u * sin + v * cos)) for u, v in corners]


def _cross(arm: float, half: float) -> tuple[tuple[float, float], ...]:
    return (
        (-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half), (half, half),
        (half, arm), (-half, arm), (-half, half), (-arm, half), (-arm, -half), (-half, -half),
    )  # fmt: skip


_UNIT_OUTLINES: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)),
    "triangle": ((0.0, -1.0), (1.0, 0.85), (-1.0, 0.85)),
    "cross": _cross(1.0, 0.34),
}


def _noisy(image: Image.Image, picture: Picture) -> Image.Image:
    if picture.noise <= 0:
        return image
    pixels = np.asarray(image, dtype=np.float32)
    grain = np.random.default_rng(picture.noise_seed).standard_normal(pixels.shape, dtype=np.float32)
    return Image.fromarray(np.clip(pixels + picture.noise * grain, 0, 255).astype(np.uint8))


def _as_file(image: Image.Image, jpeg_quality: int | None) -> Image.Image:
    if jpeg_quality is None:
        return image
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=jpeg_quality)
    return Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
