"""The requests that verification asks: text alone, one picture, several, in many sizes and lengths."""

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

_SIZES = ((64, 64), (96, 96), (160, 192), (128, 64), (256, 256), (200, 120), (100, 250), (224, 224))
_CLIP_SIZES = ((64, 64), (96, 96), (128, 64))
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
class FrameClip:
    """A clip as encoded pictures, so many of them a second."""

    frames: tuple[bytes, ...]
    fps: float


Medium = bytes | FrameClip
"""A picture as an encoded file, or a clip."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """One question, with its pictures and clips in front of everything that was ever asked."""

    name: str
    media: tuple[Medium, ...]
    question: str
    max_output_tokens: int
    min_output_tokens: int = 0
    earlier: tuple[Exchange, ...] = ()


def verify_requests(count: int, seed: int, *, forced_tokens: int = 0) -> list[VerifyRequest]:
    """`count` different requests. `forced_tokens` > 0 forbids the end before that many tokens, so that
    a checkpoint of random weights says more than nothing."""
    source = _endless(random.Random(seed))
    return [_request(index, next(source), forced_tokens) for index in range(count)]


_Content = tuple[tuple[Medium, ...], str, tuple[Exchange, ...]]


def _endless(rng: random.Random) -> Iterator[_Content]:
    while True:
        yield (), rng.choice(_TEXT_QUESTIONS) + f" ({rng.randrange(1000)})", ()
        for _ in range(3):
            yield (picture(rng),), rng.choice(_QUESTIONS), ()
        yield tuple(picture(rng) for _ in range(2)), "Which picture has the red circle?", ()
        yield (picture(rng),), " ".join(rng.choice(_QUESTIONS) for _ in range(rng.randint(2, 12))), ()
        yield tuple(picture(rng) for _ in range(3)), "What colour is the shape in the second picture?", ()
        yield from _conversation(rng)
        yield (clip(rng),), "What do you see?", ()
        yield (picture(rng), clip(rng), picture(rng)), "What is in the picture?", ()
        yield (clip(rng), picture(rng), clip(rng)), "Which way does it move?", ()


def _conversation(rng: random.Random) -> Iterator[_Content]:
    """A question about a picture, another about the same, and two ways in which the talk may go on."""
    media, question = (picture(rng),), "What do you see?"
    yield media, question, ()
    yield media, "What do you see? And where?", ()
    for answer in ("A red circle.", "A red square and nothing else."):
        yield media, rng.choice(_QUESTIONS), (Exchange(question, answer),)


def _request(index: int, content: _Content, forced_tokens: int) -> VerifyRequest:
    media, question, earlier = content
    return VerifyRequest(
        name=f"request {index} ({len(media)} pictures or clips, {len(earlier)} earlier turns)",
        media=media,
        question=question,
        max_output_tokens=max(forced_tokens, 8 + 5 * (index % 8)),
        min_output_tokens=forced_tokens,
        earlier=earlier,
    )


def picture(rng: random.Random) -> bytes:
    """A PNG of one to three coloured shapes in one of several sizes."""
    return _drawing(rng, *rng.choice(_SIZES))


def clip(rng: random.Random) -> FrameClip:
    """One to seven drawings of a size that needs no resize, at one of several rates."""
    size = rng.choice(_CLIP_SIZES)
    frames = tuple(_drawing(rng, *size) for _ in range(rng.randint(1, 7)))
    return FrameClip(frames, rng.choice((1.0, 2.0, 4.0)))


def _drawing(rng: random.Random, width: int, height: int) -> bytes:
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
