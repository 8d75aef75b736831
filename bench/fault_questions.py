"""The questions that are asked while things fail; their pictures can be new to the store every time."""

import random
import struct
import zlib
from dataclasses import dataclass, replace

from bench.requests import picture
from lenspair_client import Generation

_PICTURE_QUESTIONS = ("Describe the picture.", "What do you see?", "How many shapes are there?")
_TEXT_QUESTIONS = ("Say hello.", "What is two plus three?", "Who are you?")
# Behind the signature and the header, where a PNG may hold comments.
_PNG_HEADER_BYTES = 33


@dataclass(frozen=True, slots=True)
class Known:
    """A question whose answer is known: `expected` is what the pair says when nothing fails."""

    text: str
    images: tuple[bytes, ...]
    generation: Generation
    expected: str = ""

    def with_new_pictures(self, number: int) -> "Known":
        """The same question about pictures of other bytes and equal pixels: they must be encoded anew."""
        return replace(self, images=tuple(with_comment(image, str(number)) for image in self.images))


def questions(count: int, seed: int) -> list[Known]:
    """`count` questions: text alone, one picture, two; short answers, long ones, and drawn ones."""
    rng = random.Random(seed)
    return [_question(number, rng) for number in range(count)]


def with_comment(png: bytes, comment: str) -> bytes:
    """The same picture in another file."""
    body = b"tEXtComment\0" + comment.encode("latin-1")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:_PNG_HEADER_BYTES] + chunk + png[_PNG_HEADER_BYTES:]


def _question(number: int, rng: random.Random) -> Known:
    generation = _generation(number, rng)
    match number % 4:
        case 0:
            return Known(rng.choice(_TEXT_QUESTIONS), (), generation)
        case 1 | 2:
            return Known(rng.choice(_PICTURE_QUESTIONS), (picture(rng),), generation)
        case _:
            return Known("Which picture has the red circle?", (picture(rng), picture(rng)), generation)


def _generation(number: int, rng: random.Random) -> Generation:
    match number % 3:
        case 0:
            return Generation(max_output_tokens=32)
        case 1:
            return Generation(max_output_tokens=64, min_output_tokens=64)
        case _:  # the seed decides, so that an answer may change decoders in the middle
            return Generation(
                max_output_tokens=64, min_output_tokens=64, temperature=0.8, seed=rng.randrange(1000)
            )
