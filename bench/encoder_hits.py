"""What a known picture costs a caller, beside an empty call with the same bytes."""

import hashlib
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from PIL import Image

from bench.empty_server import METHOD
from demo.pair import Pair
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc

CALLS = 100
JPEG_BYTES = 2_000_000
_OPTIONS = (("grpc.max_send_message_length", 64 * 1024 * 1024),)


@dataclass(frozen=True, slots=True)
class Hits:
    """Medians, in seconds: a hit beside an empty call with as many bytes, a look-up beside an empty one."""

    hit: float
    empty_large: float
    lookup: float
    empty_small: float


def jpeg(size_bytes: int = JPEG_BYTES) -> bytes:
    """A photograph-like file of about so many bytes."""
    side = 64
    while True:
        pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(pixels).save(data, "JPEG", quality=90)
        if data.tell() >= size_bytes:
            return data.getvalue()
        side += max(32, side // 8)


def measure() -> Hits:
    """On the demonstration checkpoint: what a hit costs does not depend on the model."""
    data = jpeg()
    media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_IMAGE, data=data)
    query = encoder_pb2.FeatureQuery(
        modality=encoder_pb2.MODALITY_IMAGE, sha256=hashlib.sha256(data).digest()
    )
    encode, lookup = (
        encoder_pb2.EncodeRequest(media=media),
        encoder_pb2.LookupFeaturesRequest(queries=[query]),
    )
    with (
        Pair() as pair,
        _empty_server() as empty_address,
        grpc.insecure_channel(pair.encoder.address, options=_OPTIONS) as channel,
        grpc.insecure_channel(empty_address, options=_OPTIONS) as empty_channel,
    ):
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        empty: Any = empty_channel.unary_unary(METHOD)
        assert stub.Encode(encode).outcome == encoder_pb2.OUTCOME_ENCODED
        assert stub.LookupFeatures(lookup).results[0].HasField("feature")
        large, small = encode.SerializeToString(), lookup.SerializeToString()
        seconds: dict[str, list[float]] = {"hit": [], "empty_large": [], "lookup": [], "empty_small": []}
        for _ in range(CALLS):
            seconds["hit"].append(_timed(lambda: stub.Encode(encode)))
            seconds["empty_large"].append(_timed(lambda: empty(large)))
            seconds["lookup"].append(_timed(lambda: stub.LookupFeatures(lookup)))
            seconds["empty_small"].append(_timed(lambda: empty(small)))
    return Hits(**{name: statistics.median(values) for name, values in seconds.items()})


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def _empty_server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.empty_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
