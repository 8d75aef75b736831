"""What a request wants done next; the vocabulary between its logic and the two kinds of clients.

A request's logic (pictures.py, answers.py, asking.py, stored.py) is a generator: it yields one of these,
is sent the result or has the error thrown into it, and returns the request's value. The blocking and the
asyncio client each do what is asked in their own way, and hold no logic.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from lenspair_client.values import Image
from shared.pb.lenspair.decoder.v1.decoder_pb2 import StreamGenerateRequest
from shared.pb.lenspair.encoder.v1.encoder_pb2 import StreamEncodeRequest

T = TypeVar("T")


class Method(StrEnum):
    """The unary methods, by their names in the contracts."""

    ENCODE = "Encode"
    LOOK_UP = "LookupFeatures"
    GENERATE = "Generate"
    COUNT_TOKENS = "CountTokens"
    KEEP_ALIVE = "KeepAlive"
    EVICT = "Evict"
    DESCRIBE = "DescribeFeatures"
    STORE_STATS = "GetStoreStats"


@dataclass(frozen=True, slots=True)
class Load:
    """Read a picture and compute its digest; gives a Media."""

    image: Image


@dataclass(frozen=True, slots=True)
class Unary:
    """Make a call; gives its response."""

    method: Method
    request: Message
    timeout: float


@dataclass(frozen=True, slots=True)
class Upload:
    """Make a StreamEncode call; gives its response."""

    chunks: Callable[[], Iterator[StreamEncodeRequest]]
    timeout: float


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a StreamGenerate call, in place of an earlier one; gives None."""

    request: StreamGenerateRequest
    timeout: float


@dataclass(frozen=True, slots=True)
class Read:
    """Wait for the open call's next message; gives it, or None at the end."""


@dataclass(frozen=True, slots=True)
class Show:
    """Hand the next piece of text to the caller; gives None."""

    text: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait; gives None."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Together:
    """Run flows side by side, a few at a time; gives the list of their values, or the first error."""

    flows: Sequence["Flow[Any]"]


Effect: TypeAlias = Load | Unary | Upload | Open | Read | Show | Sleep | Together
Flow: TypeAlias = Generator[Effect, Any, T]

CONCURRENT_FLOWS = 4
