"""Encoders that store in different dtypes share a store and a decoder, and never a key."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from demo.pair import DEMO_CHECKPOINT, Pair, ServiceProcess
from lenspair_client import Feature, LenspairClient, Outcome, Turn

COLOURS = ("red", "green", "blue")
HIDDEN_SIZE = 128  # of the demonstration checkpoint


def _circle(colour: str) -> bytes:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((24, 24, 72, 72), fill=colour)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


@contextmanager
def _encoder(store_url: str, store_dtype: str, folder: Path) -> Iterator[ServiceProcess]:
    environment = {
        **os.environ,
        "LENSPAIR_CHECKPOINT": str(DEMO_CHECKPOINT),
        "LENSPAIR_STORE_URL": store_url,
        "LENSPAIR_STORE_DTYPE": store_dtype,
        "LENSPAIR_TORCH_THREADS": "1",
    }
    folder.mkdir()
    process = ServiceProcess("encoder", environment, folder)
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def _answer(client: LenspairClient, feature: Feature) -> str:
    return client.generate([Turn("user", (feature, "What colour is the circle?"))]).text


@pytest.mark.parametrize(
    ("store_dtype", "bytes_a_row_and_level"), [("bfloat16", 2 * HIDDEN_SIZE), ("fp8", HIDDEN_SIZE + 1)]
)
def test_one_decoder_serves_encoders_of_several_dtypes(
    pair: Pair, tmp_path: Path, store_dtype: str, bytes_a_row_and_level: int
) -> None:
    with (
        _encoder(pair.store_url, store_dtype, tmp_path / "encoder") as encoder,
        LenspairClient(pair.encoder.address, pair.decoder.address) as plain,
        LenspairClient(encoder.address, pair.decoder.address) as narrow,
    ):
        for colour in COLOURS:
            own, narrower = (client.encode(_circle(colour)) for client in (plain, narrow))
            tenants, namespaces, digests = zip(*(f.key.split(".") for f in (own, narrower)), strict=True)
            assert tenants[0] == tenants[1]
            assert digests[0] == digests[1]
            assert namespaces[0] != namespaces[1]
            assert narrower.size_bytes == own.size_bytes // (4 * HIDDEN_SIZE) * bytes_a_row_and_level
            assert narrow.encode(_circle(colour)).outcome is Outcome.HIT
            assert [_answer(plain, feature) for feature in (own, narrower)] == [colour, colour]


def test_a_whole_pair_with_fp8_answers() -> None:
    """The setting reaches the decoder as well, which reads what the manifests say."""
    with (
        Pair(environment={"LENSPAIR_STORE_DTYPE": "fp8"}) as pair,
        LenspairClient(pair.encoder.address, pair.decoder.address) as client,
    ):
        pictures = [_circle(colour) for colour in COLOURS]
        for colour, picture in zip(COLOURS, pictures, strict=True):
            assert client.ask("What colour is the circle?", [picture]).text == colour
        answer = client.ask("What colour is the shape in the second picture?", pictures[:2])
        assert answer.text == "green"
