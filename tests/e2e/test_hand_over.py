"""The pair on the demonstration checkpoint answers about pictures while its store is gone, stuck or full."""

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from PIL import Image, ImageDraw

from demo.pair import Pair
from demo.ports import free_port
from lenspair_client import (
    Answer,
    ClientOptions,
    Feature,
    Generation,
    LenspairClient,
    LenspairRpcError,
    Outcome,
    Turn,
)

STORE_TIMEOUT_SECONDS = 1.0
QUESTION = "What colour is the circle?"
FAULTS = ("killed", "stopped", "full")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    environment = {"LENSPAIR_STORE_TIMEOUT_SECONDS": str(STORE_TIMEOUT_SECONDS)}
    with Pair(environment=environment, store_port=free_port(), hand_over=True) as running:
        yield running


@pytest.fixture
def client(pair: Pair) -> Iterator[LenspairClient]:
    with LenspairClient(pair.encoder.address, pair.decoder.address) as connected:
        yield connected


@contextmanager
def _harmed(pair: Pair, fault: str) -> Iterator[None]:
    """The store fails while the block runs; afterwards it is back, and empty unless it was only stopped."""
    assert pair.store is not None
    match fault:
        case "killed":
            os.kill(pair.store.pid, signal.SIGKILL)
        case "stopped":
            os.kill(pair.store.pid, signal.SIGSTOP)
        case _:
            with redis.Redis.from_url(pair.store_url) as connected:
                connected.flushall()
                connected.config_set("maxmemory-policy", "noeviction")
                connected.config_set("maxmemory", "1kb")
    try:
        yield
    finally:
        if fault == "stopped":
            os.kill(pair.store.pid, signal.SIGCONT)
        else:
            pair.restart_store()


def _circle(colour: str, size: int) -> bytes:
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((24, 24, 72, 72), fill=colour)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _ask(client: LenspairClient, feature: Feature) -> Answer:
    generation = Generation(return_token_ids=True, top_logprobs=0)
    return client.generate([Turn("user", (feature, QUESTION))], generation)


# S05
@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_answer_without_the_store(pair: Pair, client: LenspairClient, fault: str) -> None:
    size = 96 + FAULTS.index(fault)  # a picture of this test's own
    pictures = {colour: _circle(colour, size) for colour in ("red", "blue")}
    features = {colour: client.encode(picture) for colour, picture in pictures.items()}
    expected = {colour: _ask(client, feature) for colour, feature in features.items()}
    assert {colour: answer.text for colour, answer in expected.items()} == {"red": "red", "blue": "blue"}
    assert not any(feature.source for feature in features.values())
    with _harmed(pair, fault):
        offered = {colour: client.encode(picture) for colour, picture in pictures.items()}
        answers = {colour: _ask(client, feature) for colour, feature in offered.items()}
    for colour, feature in offered.items():
        assert (feature.source != "", feature.outcome) == (True, Outcome.ENCODED)
        assert feature.key == features[colour].key
        assert answers[colour].text == expected[colour].text
        assert answers[colour].token_ids == expected[colour].token_ids
    # The store is back: what it lost comes from the encoder's memory, and needs no source any more.
    back = client.encode(pictures["blue"])
    assert (back.outcome, back.source) == (Outcome.HIT, "")
    assert _ask(client, back).text == "blue"


def test_who_wants_no_hand_over_gets_a_typed_error_in_time(pair: Pair) -> None:
    options = ClientOptions(allow_hand_over=False, patience_seconds=0)
    with (
        LenspairClient(pair.encoder.address, pair.decoder.address, options) as strict,
        _harmed(pair, "stopped"),
    ):
        started = time.monotonic()
        with pytest.raises(LenspairRpcError) as caught:
            strict.encode(_circle("green", 100))
        answer = strict.generate([Turn("user", ("Say hello.",))])
    assert caught.value.reason == "STORE_UNAVAILABLE"
    assert time.monotonic() - started < 30
    assert answer.text


def test_a_full_store_is_nothing_that_a_caller_notices(pair: Pair, client: LenspairClient) -> None:
    with _harmed(pair, "full"):
        answer = client.ask(QUESTION, [_circle("yellow", 104)])
        [streamed] = [
            step for step in client.ask_stream(QUESTION, [_circle("yellow", 104)]) if isinstance(step, Answer)
        ]
    assert answer.text == streamed.text == "yellow"
    assert answer.features[0].source == streamed.features[0].source != ""
