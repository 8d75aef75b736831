"""What is drawn depends on the value alone, and what stands on a picture can be told from it."""

import random

import numpy as np
import pytest

from demo import scenes
from demo.pictures import COLOURS, ZONES, draw
from demo.pixels import native_size, served_size

SIZES = ((64, 64), (96, 64), (128, 160), (256, 256))


@pytest.mark.parametrize("size", SIZES)
def test_the_same_seed_draws_the_same_pixels(size: scenes.Size) -> None:
    first, second = (scenes.several(size, 2, random.Random("a seed")) for _ in range(2))
    assert first == second
    assert np.array_equal(np.asarray(draw(first)), np.asarray(draw(second)))


def test_noise_and_jpeg_damage_are_part_of_the_value() -> None:
    rng = random.Random(3)
    pictures = [scenes.single((96, 96), rng) for _ in range(40)]
    damaged = [picture for picture in pictures if picture.noise or picture.jpeg_quality]
    assert damaged
    for picture in damaged:
        assert np.array_equal(np.asarray(draw(picture)), np.asarray(draw(picture)))


@pytest.mark.parametrize("size", SIZES)
def test_shapes_lie_inside_the_picture_and_in_their_zone(size: scenes.Size) -> None:
    width, height = size
    rng = random.Random(5)
    for _ in range(100):
        for mark in scenes.several(size, rng.randint(1, 3), rng).marks:
            assert mark.radius <= mark.x <= width - mark.radius
            assert mark.radius <= mark.y <= height - mark.radius
            assert mark.zone is not None
            distances = {
                zone: abs(mark.x / width - u) + abs(mark.y / height - v) for zone, (u, v) in ZONES.items()
            }
            assert min(distances, key=lambda zone: distances[zone]) == mark.zone or (mark.zone != "middle")


def test_the_centre_of_a_mark_shows_its_colour() -> None:
    rng = random.Random(7)
    for _ in range(50):
        picture = scenes.several((128, 128), 2, rng)
        pixels = np.asarray(draw(picture)).astype(int)
        for mark in picture.marks:
            seen = pixels[round(mark.y), round(mark.x)]
            nearest = min(
                COLOURS,
                key=lambda name: min(int(np.abs(seen - rgb).sum()) for rgb in COLOURS[name]),
            )
            assert nearest == mark.colour


def test_a_moving_shape_moves_one_way_only() -> None:
    rng = random.Random(9)
    for way, sign in (("left", -1), ("right", 1), ("up", -1), ("down", 1)):
        frames = scenes.moving((96, 128), way, 5, rng)
        across = way in ("left", "right")
        places = [frame.marks[0].x if across else frame.marks[0].y for frame in frames]
        others = {frame.marks[0].y if across else frame.marks[0].x for frame in frames}
        assert places == sorted(places, reverse=sign < 0)
        assert len(others) == 1


def test_native_sizes_are_served_at_the_size_they_stand_for() -> None:
    rng = random.Random(11)
    for served in ((64, 64), (96, 128), (256, 256)):
        assert {served_size(native_size(served, rng)) for _ in range(50)} == {served}
