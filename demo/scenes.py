"""Owns the seeded choice of what stands on a picture and where; knows nothing of questions."""

from __future__ import annotations

import random
from dataclasses import replace

from demo.pictures import COLOURS, SHAPES, ZONES, Mark, Picture, Rgb, shade

Size = tuple[int, int]

COLOUR_NAMES = tuple(COLOURS)
ZONE_NAMES = tuple(ZONES)
LARGEST_RADIUS = 42.0


def random_name(rng: random.Random) -> tuple[str, str]:
    return rng.choice(COLOUR_NAMES), rng.choice(SHAPES)


def blank(size: Size, colours: set[str], rng: random.Random) -> Picture:
    """An empty picture on whose background every one of the colours can be seen."""
    width, height = size
    return Picture(
        width=width,
        height=height,
        background=_background("black" not in colours, rng),
        marks=(),
        smooth=rng.random() < 0.5,
        noise=rng.uniform(1, 7) if rng.random() < 0.35 else 0.0,
        noise_seed=rng.getrandbits(32),
        jpeg_quality=rng.randint(82, 95) if rng.random() < 0.25 else None,
    )


def _background(may_be_dark: bool, rng: random.Random) -> Rgb:
    draw = rng.random()
    if draw < 0.25:
        return (255, 255, 255)
    if draw < 0.35 and may_be_dark:
        level = rng.randint(12, 50)
    elif draw < 0.5:
        level = rng.randint(130, 200)
    else:
        level = rng.randint(205, 250)
    return (_tint(level, rng), _tint(level, rng), _tint(level, rng))


def _tint(level: int, rng: random.Random) -> int:
    return min(255, max(0, level + rng.randint(-6, 6)))


def single(size: Size, rng: random.Random) -> Picture:
    """One shape, from small in a corner to nearly filling the picture."""
    name = random_name(rng)
    if rng.random() < 0.5:
        return with_names(size, [name], rng)
    width, height = size
    short = min(size)
    radius = min(rng.uniform(0.22, 0.42) * short, LARGEST_RADIUS)
    x = rng.uniform(radius + 1, width - radius - 1)
    y = rng.uniform(radius + 1, height - radius - 1)
    mark = _mark(name, (x, y, radius), None, rng)
    return blank(size, {name[0]}, rng).with_marks((mark,))


def several(size: Size, count: int, rng: random.Random) -> Picture:
    """`count` shapes in different zones, no two with the same colour and shape."""
    names: list[tuple[str, str]] = []
    while len(names) < count:
        name = random_name(rng)
        if name not in names:
            names.append(name)
    return with_names(size, names, rng)


def crowd(size: Size, count: int, rng: random.Random) -> Picture:
    """`count` shapes out of few colours and shapes, so that there is something to count."""
    colours = rng.sample(COLOUR_NAMES, 2)
    shapes = rng.sample(SHAPES, 2)
    names = [(rng.choice(colours), rng.choice(shapes)) for _ in range(count)]
    return with_names(size, names, rng)


def with_names(size: Size, names: list[tuple[str, str]], rng: random.Random) -> Picture:
    """The named shapes, in random zones, listed in reading order."""
    short = min(size)
    roomy = short >= 96 or len(names) == 1
    open_zones = [zone for zone in ZONE_NAMES if roomy or zone != "middle"]
    zones = sorted(rng.sample(open_zones, len(names)), key=ZONE_NAMES.index)
    crowded = "middle" in zones and len(names) > 1
    least, most = (0.13, 0.15) if crowded else (0.16, 0.22)
    marks = []
    for name, zone in zip(names, zones, strict=True):
        radius = min(rng.uniform(least, most) * short, LARGEST_RADIUS)
        x, y = _point_in(size, zone, radius, crowded, rng)
        marks.append(_mark(name, (x, y, radius), zone, rng))
    return blank(size, {colour for colour, _ in names}, rng).with_marks(tuple(marks))


def _point_in(size: Size, zone: str, radius: float, crowded: bool, rng: random.Random) -> tuple[float, float]:
    """A centre in the zone, so that shapes in different zones do not touch."""
    width, height = size
    u, v = ZONES[zone]
    if crowded or zone == "middle":
        slack_x, slack_y = 0.04 * width, 0.04 * height
    else:
        slack_x, slack_y = 0.8 * (width / 4 - radius), 0.8 * (height / 4 - radius)
    x = u * width + rng.uniform(-slack_x, slack_x)
    y = v * height + rng.uniform(-slack_y, slack_y)
    return x, y


def _mark(
    name: tuple[str, str],
    place: tuple[float, float, float],
    zone: str | None,
    rng: random.Random,
) -> Mark:
    colour, shape = name
    x, y, radius = place
    tilt = rng.uniform(-0.12, 0.12)
    return Mark(shape, colour, shade(colour, rng), x, y, radius, tilt, zone)


def number(size: Size, digits: str, rng: random.Random) -> Picture:
    """The digits in one row and in one colour; radius is half of the font size."""
    width, height = size
    colour = rng.choice(COLOUR_NAMES)
    rgb = shade(colour, rng)
    # At least 30 pixels apart, so that hardly any two digits share a visual token.
    pitch = rng.uniform(30, max(30, min(42, (width - 6) / len(digits))))
    largest = min(0.44 * height, 0.75 * pitch if len(digits) > 1 else 34)
    radius = rng.uniform(min(17, largest), largest)
    reach = pitch * (len(digits) - 1) / 2 + 0.6 * radius
    x = rng.uniform(min(reach, width / 2), max(width - reach, width / 2))
    y = rng.uniform(0.85 * radius, height - 0.85 * radius)
    start = x - pitch * (len(digits) - 1) / 2
    marks = tuple(
        Mark(digit, colour, rgb, start + index * pitch, y, radius) for index, digit in enumerate(digits)
    )
    return blank(size, {colour}, rng).with_marks(marks)


def moving(size: Size, way: str, frame_count: int, rng: random.Random) -> tuple[Picture, ...]:
    """One shape that crosses at least two fifths of the picture in the given direction."""
    width, height = size
    radius = rng.uniform(0.14, 0.22) * min(size)
    across = way in ("left", "right")
    length = width if across else height
    low, high = radius + 1, length - radius - 1
    travel = rng.uniform(min(0.4 * length, high - low), high - low)
    start = rng.uniform(low, high - travel)
    stops = [start + travel * index / (frame_count - 1) for index in range(frame_count)]
    if way in ("left", "up"):
        stops.reverse()
    other_length = height if across else width
    other = rng.uniform(radius + 1, other_length - radius - 1)
    first = _mark(random_name(rng), (0.0, 0.0, radius), None, rng)
    stage = blank(size, {first.colour}, rng)
    points = [(stop, other) if across else (other, stop) for stop in stops]
    return tuple(_frame(stage, replace(first, x=x, y=y), index) for index, (x, y) in enumerate(points))


def changing(size: Size, colours: list[str], rng: random.Random) -> tuple[Picture, ...]:
    """One shape at rest that shows each colour for two frames (one temporal patch)."""
    radius = rng.uniform(0.2, 0.36) * min(size)
    width, height = size
    x = rng.uniform(radius + 1, width - radius - 1)
    y = rng.uniform(radius + 1, height - radius - 1)
    shape = rng.choice(SHAPES)
    stage = blank(size, set(colours), rng)
    marks = [_mark((colour, shape), (x, y, radius), None, rng) for colour in colours]
    return tuple(_frame(stage, marks[index // 2], index) for index in range(2 * len(colours)))


def _frame(stage: Picture, mark: Mark, index: int) -> Picture:
    return replace(stage, marks=(mark,), noise_seed=stage.noise_seed + index)
