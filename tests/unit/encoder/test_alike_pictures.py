"""Pictures that other systems took for one another: equal pixel buffers, equal perceptual hashes."""

import itertools

import pytest
import torch
from PIL import Image, ImageDraw

from encoder_service.preprocess import ImagePreprocessor
from tests.unit.encoder.harness import an_encoder, picture
from tests.unit.encoder.samples import encoded, solid


def stripes(width: int, height: int) -> bytes:
    """Black and white pixels by turns, whatever the shape: every such picture has the same buffer."""
    pixels = bytes(itertools.islice(itertools.cycle([0, 0, 0, 255, 255, 255]), width * height * 3))
    return encoded(Image.frombytes("RGB", (width, height), pixels))


def ramp(*, red_only: bool) -> bytes:
    """From dark to light, left to right."""
    grey = Image.linear_gradient("L").rotate(90)
    dark = Image.new("L", grey.size)
    return encoded(Image.merge("RGB", (grey, dark, dark) if red_only else (grey, grey, grey)))


def page(number: str) -> bytes:
    """A document of twenty lines, one of which holds the number."""
    image = Image.new("RGB", (800, 1000), "white")
    draw = ImageDraw.Draw(image)
    for line in range(20):
        text = f"Total {number}" if line == 12 else "Lorem ipsum dolor sit amet, consectetur"
        draw.text((60, 40 + 46 * line), text, fill="black", font_size=24)
    return encoded(image)


ALIKE = {
    "C01 equal buffers": [stripes(30, 150), stripes(150, 30)],
    "C16 equal hashes": [solid("blue", 640, 360), solid("white", 640, 360), solid("red", 320, 320)],
    "C16 ramps": [ramp(red_only=False), ramp(red_only=True)],
    "C17 one digit": [page("3"), page("8")],
}


# C01, C16, C17
@pytest.mark.parametrize("name", ALIKE)
async def test_alike_pictures_share_neither_key_nor_features(
    demo_preprocessor: ImagePreprocessor, name: str
) -> None:
    tensors, keys = [], set()
    async with an_encoder(demo_preprocessor) as harness:
        for data in ALIKE[name]:
            feature = (await harness.service.encode(picture(data))).feature
            bundle = await harness.store.fetch(feature.manifest)
            assert bundle is not None
            keys.add(feature.manifest.key)
            tensors.append(bundle.tensor)
    assert len(keys) == len(ALIKE[name])
    for one, other in itertools.combinations(tensors, 2):
        assert one.shape != other.shape or not torch.equal(one, other)


# C17
async def test_fifty_pages_of_one_template_are_fifty_pictures(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        results = [await harness.service.encode(picture(page(str(100 + number)))) for number in range(50)]
    assert len({result.feature.manifest.key for result in results}) == 50
