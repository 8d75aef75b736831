"""The requests that verification asks: text alone, one picture, several, in many sizes and lengths."""

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

_SIZES = ((64, 64), (96, 96), (160, 192), (128, 64), (256, 256), (200, 120), (100, 250), (224, 224))
# Mostly such as have many answers: equal short answers prove little.
_QUESTIONS = (
    "Describe the picture.",
    "What is in the picture?",
    "What do you see?",
    "How many shapes are there?",
    "Where is the circle?",
)
_TEXT_QUESTIONS = (
    "Say hello.",
    "What is two plus three?",
    "Who are you? Answer in one short sentence, please, and do not repeat the question.",
    "\n  List: red, green; 赤 and 緑 — which comes first?\n",
)
_COLOURS = ("red", "green", "blue", "yellow", "black", "purple", "orange")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked and answered before."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One question, with its pictures (encoded files) in front of everything that was ever asked."""

    name: str
    images: tuple[bytes, ...]
    question: str
    max_output_tokens: int
    min_output_tokens: int = 0
    earlier: tuple[Exchange, ...] = ()


def verify_requests(count: int, seed: int, *, forced_tokens: int = 0) -> list[VerifyRequest]:
    """`count` different requests. `forced_tokens` > 0 forbids the end before that many tokens, so that
    a checkpoint of random weights says more than nothing."""
    source = _endless(random.Random(seed))
    return [_request(index, next(source), forced_tokens) for index in range(count)]


_Content = tuple[tuple[bytes, ...], str, tuple[Exchange, ...]]


def _endless(rng: random.Random) -> Iterator[_Content]:
    while True:
        yield (), rng.choice(_TEXT_QUESTIONS) + f" ({rng.randrange(1000)})", ()
        for _ in range(3):
            yield (picture(rng),), rng.choice(_QUESTIONS), ()
        yield tuple(picture(rng) for _ in range(2)), "Which picture has the red circle?", ()
        yield (picture(rng),), " ".join(rng.choice(_QUESTIONS) for _ in range(rng.randint(2, 12))), ()
        yield tuple(picture(rng) for _ in range(3)), "What colour is the shape in the second picture?", ()
        yield from _conversation(rng)


def _conversation(rng: random.Random) -> Iterator[_Content]:
    """A question about a picture, another about the same, and two ways in which the talk may go on."""
    images, question = (picture(rng),), "What do you see?"
    yield images, question, ()
    yield images, "What do you see? And where?", ()
    for answer in ("A red circle.", "A red square and nothing else."):
        yield images, rng.choice(_QUESTIONS), (Exchange(question, answer),)


def _request(index: int, content: _Content, forced_tokens: int) -> VerifyRequest:
    images, question, earlier = content
    return VerifyRequest(
        name=f"request {index} ({len(images)} pictures, {len(earlier)} earlier turns)",
        images=images,
        question=question,
        max_output_tokens=max(forced_tokens, 8 + 5 * (index % 8)),
        min_output_tokens=forced_tokens,
        earlier=earlier,
    )


def picture(rng: random.Random) -> bytes:
    """A PNG of one to three coloured shapes in one of several sizes."""
    width, height = rng.choice(_SIZES)
    image = Image.new("RGB", (width, height), rng.choice(("white", "lightgray", "lightyellow")))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 3)):
        side = rng.randint(20, min(width, height) - 10)
        left, top = rng.randint(0, width - side), rng.randint(0, height - side)
        box = (left, top, left + side, top + side)
        rng.choice((draw.ellipse, draw.rectangle))(box, fill=rng.choice(_COLOURS))
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()
