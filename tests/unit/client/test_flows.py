"""The logic of requests, driven by a script in place of a network."""

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import pytest

from lenspair_client.answers import generate, stream
from lenspair_client.asking import Question, ask
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Load, Method, Open, Read, Show, Sleep, Together, Unary
from lenspair_client.errors import (
    DeadlineExceeded,
    FeatureNotFound,
    LenspairClientError,
    LenspairRpcError,
    QueueFull,
    Unavailable,
)
from lenspair_client.media import Media, load
from lenspair_client.pictures import Pictures
from lenspair_client.values import Answer, Generation, MediaSettings, Turn
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as decoder
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as encoder

T = TypeVar("T")
TURNS = (Turn("user", ("hello",)),)
GONE = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE)
SUMMARY = decoder.StreamGenerateResponse(summary=decoder.Summary(output_tokens=2))


class Clock:
    """Time that passes when a flow sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(flow: Flow[T], perform: Callable[[Any], Any], clock: Clock | None = None) -> tuple[T, list[str]]:
    """The value of a flow, and what it has shown. What `perform` returns as an error is thrown."""
    shown: list[str] = []

    def result_of(effect: Any) -> Any:
        match effect:
            case Show(text):
                shown.append(text)
            case Sleep(seconds) if clock is not None:
                clock.now += seconds
            case Together(flows):
                return [run(flow, perform, clock)[0] for flow in flows]
            case Load(image):
                return load(image)
            case Open() | Read() | Unary():
                return perform(effect)
        return None

    try:
        effect = next(flow)
        while True:
            result = result_of(effect)
            is_error = isinstance(result, LenspairClientError)
            effect = flow.throw(result) if is_error else flow.send(result)
    except StopIteration as end:
        return end.value, shown


def delta(text: str, *token_ids: int) -> decoder.StreamGenerateResponse:
    return decoder.StreamGenerateResponse(delta=decoder.Delta(text=text, token_ids=token_ids))


class Streams:
    """Plays one list of results after another, one for each stream that is opened."""

    def __init__(self, *streams: list[Any]) -> None:
        self.streams = [list(results) for results in streams]
        self.opened: list[list[int]] = []

    def __call__(self, effect: Any) -> Any:
        if isinstance(effect, Open):
            self.opened.append(list(effect.request.task.continuation_token_ids))
            return None
        return self.streams[len(self.opened) - 1].pop(0)


def test_a_stream_goes_on_after_the_tokens_that_came() -> None:
    streams = Streams([delta("a", 1), delta("", 2), GONE], [delta("bc", 3), SUMMARY, None])
    answer, shown = run(stream(TURNS, Generation(), Deadline(60)), streams)
    assert shown == ["a", "bc"]
    assert (answer.text, answer.token_ids, answer.resumed) == ("abc", (1, 2, 3), 1)
    assert streams.opened == [[], [1, 2]]


def test_the_callers_own_continuation_comes_first() -> None:
    streams = Streams([delta("b", 8), GONE], [SUMMARY, None])
    generation = Generation(continuation_token_ids=(7,))
    run(stream(TURNS, generation, Deadline(60)), streams)
    assert streams.opened == [[7], [7, 8]]


def test_a_stream_that_breaks_behind_its_summary_was_whole() -> None:
    streams = Streams([delta("a", 1), SUMMARY, GONE])
    answer, _ = run(stream(TURNS, Generation(), Deadline(60)), streams)
    assert (answer.text, answer.resumed) == ("a", 0)


def test_text_without_tokens_cannot_be_resumed() -> None:
    """An older server may not send them; repeating text is worse than an error."""
    streams = Streams([delta("a"), GONE])
    with pytest.raises(Unavailable):
        run(stream(TURNS, Generation(), Deadline(60)), streams)


def test_a_stream_is_tried_as_long_as_there_is_time() -> None:
    clock = Clock()
    streams = Streams(*([[GONE]] * 99))
    with pytest.raises(Unavailable):
        run(stream(TURNS, Generation(), Deadline(30, clock)), streams, clock)
    assert 129.8 < clock.now <= 130.0
    assert len(streams.opened) > 15


def test_a_stream_that_gets_on_now_and_then_needs_little_patience() -> None:
    clock = Clock()
    streams = Streams(*([GONE], [delta("a", 1), GONE]) * 20, [SUMMARY, None])
    deadline = Deadline(60, clock, patience=1)
    answer, shown = run(stream(TURNS, Generation(), deadline), streams, clock)
    assert answer.text == "".join(shown) == "a" * 20
    assert (answer.resumed, answer.repeated) == (39, 40)


def test_no_call_begins_when_the_time_is_used_up() -> None:
    clock = Clock()
    deadline = Deadline(1.0, clock)
    clock.now += 1.0
    with pytest.raises(DeadlineExceeded):
        run(stream(TURNS, Generation(), deadline), Streams())


def test_steps_share_one_deadline() -> None:
    clock = Clock()
    timeouts: list[float] = []

    def perform(effect: Unary) -> Any:
        timeouts.append(effect.timeout)
        clock.now += 1.0
        match effect.method:
            case Method.LOOK_UP:
                return encoder.LookupFeaturesResponse(results=[encoder.LookupResult()])
            case Method.ENCODE:
                return encoder.EncodeResponse(outcome=encoder.OUTCOME_JOINED)
            case _:
                return decoder.GenerateResponse(text="yes")

    deadline = Deadline(10, clock)
    pictures = Pictures(MediaSettings(), deadline, max_message_bytes=1_000_000)
    question = Question("?", (b"picture",), "", Generation())
    answer, _ = run(ask(question, pictures, deadline, is_stream=False), perform, clock)
    assert timeouts == [10.0, 9.0, 8.0]
    assert (answer.encode_seconds, answer.total_seconds) == (2.0, 3.0)
    assert answer.outcomes == ("joined",)


def test_many_pictures_are_looked_up_in_calls_of_a_legal_size() -> None:
    sizes: list[int] = []

    def perform(effect: Unary) -> Any:
        request: Any = effect.request
        sizes.append(len(request.queries))
        feature = encoder.FeatureRef(key="k")
        return encoder.LookupFeaturesResponse(results=[encoder.LookupResult(feature=feature)] * sizes[-1])

    pictures = Pictures(MediaSettings(), Deadline(60), max_message_bytes=1_000_000)
    medias = [Media(b"", number.to_bytes(32, "big")) for number in range(300)]
    features, _ = run(pictures.ensure(medias), perform)
    assert (sizes, len(features)) == ([256, 44], 300)


class Outage:
    """A pair whose calls fail in the order of a script: method names, each with an error or None."""

    def __init__(self, *script: tuple[Method, LenspairRpcError | None]) -> None:
        self._script = list(script)
        self.encoded: list[bytes] = []

    def __call__(self, effect: Unary) -> Any:
        method, error = self._script.pop(0)
        assert effect.method is method
        if error is not None:
            return error
        request: Any = effect.request
        match method:
            case Method.LOOK_UP:
                return encoder.LookupFeaturesResponse(results=[encoder.LookupResult()] * len(request.queries))
            case Method.ENCODE:
                self.encoded.append(request.media.data)
                key = request.media.data.decode()
                return encoder.EncodeResponse(feature=encoder.FeatureRef(key=key))
            case _:
                return decoder.GenerateResponse(text="yes")

    def ask(self, *images: bytes) -> Answer:
        clock = Clock()
        deadline = Deadline(60, clock)
        pictures = Pictures(MediaSettings(), deadline, max_message_bytes=1_000_000)
        question = Question("?", images, "", Generation())
        answer, _ = run(ask(question, pictures, deadline, is_stream=False), self, clock)
        assert self._script == []
        return answer


NO_STORE = Unavailable("no store", code=grpc.StatusCode.UNAVAILABLE, reason="STORE_UNAVAILABLE")
NOT_FOUND = FeatureNotFound("gone", code=grpc.StatusCode.NOT_FOUND, metadata={"keys": "a"})


def test_what_cannot_be_looked_up_is_sent() -> None:
    """An encoder may hand a feature over while the store is away, but only one that it was sent."""
    outage = Outage(
        (Method.LOOK_UP, NO_STORE),
        (Method.ENCODE, NO_STORE),
        (Method.ENCODE, None),
        (Method.GENERATE, None),
    )
    assert outage.ask(b"a").repeated == 2


def test_a_feature_that_goes_again_and_again_is_encoded_again_and_again() -> None:
    again: tuple[tuple[Method, LenspairRpcError | None], ...] = (
        (Method.GENERATE, NOT_FOUND),
        (Method.ENCODE, None),
    )
    outage = Outage(
        (Method.LOOK_UP, None),
        (Method.ENCODE, None),
        (Method.ENCODE, None),
        *again * 5,
        (Method.GENERATE, None),
    )
    assert outage.ask(b"a", b"b").repeated == 5
    assert outage.encoded == [b"a", b"b"] + [b"a"] * 5


def test_a_feature_that_is_never_found_is_reported_long_before_the_time_is_used_up() -> None:
    """Each attempt costs a pass of the vision tower where encoder and decoder have different store keys."""
    again: tuple[tuple[Method, LenspairRpcError | None], ...] = (
        (Method.ENCODE, None),
        (Method.GENERATE, NO_STORE),
        (Method.ENCODE, None),
        (Method.GENERATE, NOT_FOUND),
    )
    outage = Outage((Method.LOOK_UP, None), *again * 9)
    with pytest.raises(FeatureNotFound):
        outage.ask(b"a")
    assert len(outage.encoded) == 18


def test_a_decoder_without_its_store_is_asked_with_features_encoded_anew() -> None:
    outage = Outage(
        (Method.LOOK_UP, None),
        (Method.ENCODE, None),
        (Method.GENERATE, NO_STORE),
        (Method.ENCODE, GONE),
        (Method.ENCODE, None),
        (Method.GENERATE, GONE),
        (Method.GENERATE, None),
    )
    assert outage.ask(b"a").repeated == 3
    assert outage.encoded == [b"a", b"a"]


def test_a_feature_that_is_gone_is_no_reason_to_ask_again_without_its_picture() -> None:
    with pytest.raises(FeatureNotFound):
        run(generate(TURNS, Generation(), Deadline(60)), lambda _effect: NOT_FOUND)


def test_a_full_queue_is_waited_for() -> None:
    clock = Clock()
    full = QueueFull("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=3.0)
    results: list[Any] = [full, encoder.EncodeResponse()]
    pictures = Pictures(MediaSettings(), Deadline(60, clock), max_message_bytes=1_000_000)
    run(pictures.encode(load(b"picture")), lambda _effect: results.pop(0), clock)
    assert 103.0 <= clock.now <= 103.75
