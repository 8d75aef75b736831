"""The client library against a pair of fakes; every test runs on the blocking and on the asyncio client."""

import asyncio
import inspect
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from opentelemetry.sdk.trace import TracerProvider

from lenspair_client import (
    Answer,
    AsyncLenspairClient,
    ClientOptions,
    DeadlineExceeded,
    FeatureNotFound,
    Generation,
    InvalidArgument,
    LenspairClient,
    MediaSettings,
    Outcome,
    QueueFull,
    Turn,
    Unavailable,
    UnreadableImage,
)
from lenspair_client.options import DECODER_SERVICE
from shared import errors
from shared.errors import (
    Draining,
    InvalidMedia,
    InvalidSampling,
    StoreFull,
    StoreUnavailable,
)
from tests.rpc.fake_pair import MIB, FakePair, fake_pair, key_of
from tests.rpc.relay import relay_to

RED, BLUE = b"a red picture", b"a blue picture"
TEXT = "a red cir\u00dfle"


class Blocked:
    """The asyncio client with the blocking client's methods, so that one test can run on both."""

    def __init__(self, encoder: str, decoder: str, options: ClientOptions | None = None) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._make(encoder, decoder, options))

    async def _make(self, *arguments: Any) -> AsyncLenspairClient:
        return AsyncLenspairClient(*arguments)

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            return self._items(result) if inspect.isasyncgen(result) else self._runner.run(result)

        return call

    def _items(self, items: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._runner.run(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(items.aclose())


@pytest.fixture
def pair() -> Iterator[FakePair]:
    with fake_pair(num_decoders=2) as running:
        yield running


Connect = Callable[..., Any]


@pytest.fixture(params=[LenspairClient, Blocked], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, pair: FakePair) -> Iterator[Connect]:
    clients: list[Any] = []

    def make(options: ClientOptions | None = None) -> Any:
        clients.append(request.param(pair.encoder_address, pair.decoder_address, options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def split(steps: Iterator[str | Answer]) -> tuple[list[str], Answer]:
    """The pieces of a streamed answer, and the answer."""
    *pieces, answer = steps
    assert isinstance(answer, Answer)
    return [str(piece) for piece in pieces], answer


def test_encode_returns_the_feature(connect: Connect, pair: FakePair) -> None:
    client = connect()
    first = client.encode(RED, settings=MediaSettings(max_pixels=4096))
    assert (first.key, first.grid, first.token_count) == (key_of(RED), (1, 8, 16), 32)
    assert first.outcome is Outcome.ENCODED
    assert client.encode(RED).outcome is Outcome.HIT
    assert pair.encoder.settings[0].max_pixels == 4096
    assert not pair.encoder.settings[0].HasField("min_pixels")


def test_lookup_sends_no_picture(connect: Connect, pair: FakePair, tmp_path: Path) -> None:
    client = connect()
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    assert client.lookup(path) is None
    client.encode(path)
    assert client.lookup(path).outcome is Outcome.HIT
    assert pair.encoder.calls == ["LookupFeatures", "Encode", "LookupFeatures"]


def test_ask_encodes_what_is_missing_and_answers(connect: Connect, pair: FakePair) -> None:
    client = connect()
    client.encode(RED)
    answer = client.ask("which?", [RED, BLUE, RED], system="be brief")
    assert answer.text == TEXT
    assert answer.finish_reason == "stop"
    assert answer.outcomes == (Outcome.HIT, Outcome.ENCODED, Outcome.HIT)
    assert (answer.usage.input_tokens, answer.usage.visual_tokens) == (40, 32)
    assert 0 < answer.encode_seconds < answer.total_seconds
    assert pair.encoder.calls == ["Encode", "LookupFeatures", "Encode"]
    (task,) = pair.decoder.tasks
    assert [part.text for part in task.turns[0].parts] == ["be brief"]
    assert [part.feature_key for part in task.turns[1].parts[:3]] == [key_of(RED), key_of(BLUE), key_of(RED)]
    assert task.turns[1].parts[3].text == "which?"


def test_ask_without_pictures_asks_the_decoder_alone(connect: Connect, pair: FakePair) -> None:
    assert connect().ask("hello").text == TEXT
    assert pair.encoder.calls == []


def test_ask_stream_yields_text_and_then_the_answer(connect: Connect) -> None:
    pieces, answer = split(connect().ask_stream("which?", [RED]))
    assert pieces == ["a ", "red ", "cir\u00dfle"]
    assert answer.text == TEXT
    assert answer.outcomes == (Outcome.ENCODED,)
    assert answer.token_ids == (100, 101, 102, 103)
    assert answer.resumed == 0


def test_several_pictures_are_encoded_at_one_time(connect: Connect, pair: FakePair) -> None:
    pair.encoder.together = threading.Barrier(3)
    answer = connect().ask("which?", [b"one", b"two", b"three"])
    assert [feature.key for feature in answer.features] == [
        key_of(data) for data in (b"one", b"two", b"three")
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_lost_feature_is_encoded_again_once(connect: Connect, pair: FakePair, is_stream: bool) -> None:
    client = connect()
    pair.encoder.store.add(key_of(BLUE))
    # What the decoder sees is another set: it has BLUE, and gets RED with the second Encode.
    pair.decoder.store = forgetful = ForgetfulStore({key_of(BLUE)}, pair.encoder.store, key_of(RED))
    answer = split(client.ask_stream("?", [RED, BLUE]))[1] if is_stream else client.ask("?", [RED, BLUE])
    assert answer.text == TEXT
    assert answer.outcomes == (Outcome.ENCODED, Outcome.HIT)
    assert pair.encoder.calls == ["LookupFeatures", "Encode", "Encode"]
    assert forgetful.refusals == 1


class ForgetfulStore(set[str]):
    """Says once that a key is not there, and has the encoder forget it."""

    def __init__(self, keys: set[str], encoder_store: set[str], lost: str) -> None:
        super().__init__(keys)
        self.encoder_store = encoder_store
        self.lost = lost
        self.refusals = 0

    def __contains__(self, key: object) -> bool:
        if key == self.lost and self.refusals == 0:
            self.refusals += 1
            self.encoder_store.discard(self.lost)
            return False
        return True


def test_a_feature_that_stays_lost_is_an_error_in_the_end(connect: Connect, pair: FakePair) -> None:
    pair.decoder.store = set()
    with pytest.raises(FeatureNotFound) as lost:
        connect().ask("?", [RED], timeout=1.0)
    assert lost.value.keys == (key_of(RED),)
    assert pair.encoder.calls[:3] == ["LookupFeatures", "Encode", "Encode"]
    assert len(pair.encoder.calls) < 20


def test_encode_is_repeated_until_the_store_is_back(connect: Connect, pair: FakePair) -> None:
    pair.encoder.errors.extend([StoreUnavailable("no store"), StoreFull("full")] * 3)
    assert connect().encode(b"x" * MIB).outcome is Outcome.ENCODED
    assert pair.encoder.calls == ["Encode"] * 7


def test_a_refused_picture_ends_the_attempts_for_the_others(connect: Connect, pair: FakePair) -> None:
    going = [Draining("going")] * 100
    pair.encoder.errors.extend([*going[:1], InvalidMedia("no picture", field="media.data"), *going])
    with pytest.raises(InvalidArgument):
        connect().ask("?", [RED, BLUE], timeout=20)
    assert len(pair.encoder.calls) <= 5


def test_a_refused_picture_ends_the_open_calls_for_the_others(connect: Connect, pair: FakePair) -> None:
    pair.encoder.together = threading.Barrier(2)
    pair.encoder.hanging, pair.encoder.refused = RED, BLUE
    with pytest.raises(InvalidArgument):
        connect().ask("?", [RED, BLUE], timeout=600)
    assert pair.encoder.given_up.wait(timeout=10)


def test_encode_is_not_repeated_forever(connect: Connect, pair: FakePair) -> None:
    pair.encoder.errors.extend([StoreUnavailable("no store")] * 50)
    with pytest.raises(Unavailable) as error:
        connect().encode(RED, timeout=1.0)
    assert error.value.reason == "STORE_UNAVAILABLE"
    assert 2 < len(pair.encoder.calls) < 50


def test_a_full_queue_is_asked_again_when_it_said(connect: Connect, pair: FakePair) -> None:
    pair.encoder.errors.extend([errors.QueueFull("full", retry_after_seconds=0.05)] * 2)
    assert connect().encode(RED).outcome is Outcome.ENCODED
    assert pair.encoder.calls == ["Encode"] * 3


def test_a_full_queue_that_asks_for_more_time_than_there_is_is_an_error_at_once(
    connect: Connect, pair: FakePair
) -> None:
    pair.encoder.errors.append(errors.QueueFull("full", retry_after_seconds=30))
    with pytest.raises(QueueFull) as error:
        connect().encode(RED, timeout=5)
    assert error.value.retry_after == 30
    assert pair.encoder.calls == ["Encode"]


def test_a_refused_picture_is_sent_once(connect: Connect, pair: FakePair) -> None:
    pair.encoder.errors.append(InvalidMedia("no picture", field="media.data"))
    with pytest.raises(InvalidArgument) as error:
        connect().ask("?", [RED])
    # The look-up has taken the error.
    assert (error.value.reason, error.value.field) == ("INVALID_MEDIA", "media.data")
    assert pair.encoder.calls == ["LookupFeatures"]


def test_a_picture_beyond_a_message_goes_in_chunks(connect: Connect, pair: FakePair) -> None:
    data = b"x" * (2 * MIB + 5)
    pair.encoder.errors.append(Draining("going"))
    feature = connect(ClientOptions(max_message_bytes=2 * MIB)).encode(data)
    assert feature.key == key_of(data)
    assert pair.encoder.calls == ["StreamEncode", "StreamEncode"]
    assert pair.encoder.chunk_sizes == [MIB, MIB, 5]


def test_an_unreadable_file_is_told_before_anything_is_sent(connect: Connect, pair: FakePair) -> None:
    with pytest.raises(UnreadableImage, match=r"nope\.png: No such file"):
        connect().ask("?", [Path("nope.png")])
    assert pair.encoder.calls == []


def test_generate_takes_a_conversation(connect: Connect, pair: FakePair) -> None:
    client = connect()
    feature = client.encode(RED)
    turns = [
        Turn("user", (feature, "which colour?")),
        Turn("assistant", ("red",)),
        Turn("user", ("which shape?",)),
    ]
    generation = Generation(temperature=0.0, seed=0, stop_sequences=("x",), return_token_ids=True)
    answer = client.generate(turns, generation)
    assert (answer.text, answer.token_ids, answer.features) == (TEXT, (100, 101, 102, 103), ())
    (task,) = pair.decoder.tasks
    assert task.sampling.HasField("temperature")
    assert task.sampling.HasField("seed")
    assert not task.sampling.HasField("top_p")
    assert [turn.role for turn in task.turns] == [2, 3, 2]


def test_generate_is_asked_for_until_a_decoder_stays(connect: Connect, pair: FakePair) -> None:
    pair.decoder.errors.extend([Draining("going"), errors.QueueFull("full", retry_after_seconds=0.05)] * 2)
    answer = connect().ask("?")
    assert (answer.text, answer.repeated) == (TEXT, 4)


def test_patience_ends_before_the_time(connect: Connect, pair: FakePair) -> None:
    pair.decoder.errors.extend([Draining("going")] * 50)
    with pytest.raises(Unavailable, match="going"):
        connect(ClientOptions(patience_seconds=0.3)).ask("?")
    assert 1 < len(pair.decoder.tasks) < 10


@pytest.mark.parametrize("deaths", [[0], [1], [2], [3], [4], [1, 0, 1, 0, 0, 1]])
def test_a_broken_stream_goes_on_without_losing_or_repeating_text(
    connect: Connect, pair: FakePair, deaths: Sequence[int]
) -> None:
    """After a token whose text has not come yet, too."""
    pair.decoder.deaths.extend(deaths)
    pieces, answer = split(connect().ask_stream("?"))
    assert "".join(pieces) == answer.text == TEXT
    assert answer.token_ids == (100, 101, 102, 103)
    assert answer.repeated == len(deaths)
    received = [list(task.continuation_token_ids) for task in pair.decoder.tasks]
    assert received == [list(range(100, 100 + sum(deaths[:number]))) for number in range(len(deaths) + 1)]
    assert answer.resumed == sum(map(bool, received))


def test_a_stream_that_ends_without_its_summary_was_cut_off(connect: Connect, pair: FakePair) -> None:
    pair.decoder.sends_summary = False
    with pytest.raises(Unavailable, match="cut off"):
        split(connect().ask_stream("?", timeout=1))


def test_a_stream_that_never_gets_on_is_given_up_in_time(connect: Connect, pair: FakePair) -> None:
    pair.decoder.errors.extend([Draining("going")] * 50)
    with pytest.raises(Unavailable, match="going"):
        split(connect().ask_stream("?", timeout=1.0))
    assert 2 < len(pair.decoder.tasks) < 50


def test_a_refused_stream_is_not_repeated(connect: Connect, pair: FakePair) -> None:
    pair.decoder.errors.append(InvalidSampling("too hot", field="task.sampling.temperature"))
    with pytest.raises(InvalidArgument) as error:
        split(connect().ask_stream("?"))
    assert error.value.field == "task.sampling.temperature"
    assert len(pair.decoder.tasks) == 1


def test_one_deadline_holds_for_all_steps(connect: Connect, pair: FakePair) -> None:
    client = connect()
    pair.decoder.hangs_after = 1
    stream = client.ask_stream("?", [RED], timeout=0.5)
    assert next(stream) == "a "
    with pytest.raises(DeadlineExceeded):
        next(stream)
    assert pair.decoder.remaining[0] < 0.5


def test_a_call_without_timeout_has_one_all_the_same(connect: Connect, pair: FakePair) -> None:
    connect(ClientOptions(timeout_seconds=7)).ask("?")
    assert 6 < pair.decoder.remaining[0] < 7


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_there_is_no_endless_call(connect: Connect, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        connect().ask("?", timeout=timeout)


def test_leaving_a_stream_ends_its_call(connect: Connect, pair: FakePair) -> None:
    pair.decoder.hangs_after = 1
    stream = connect().ask_stream("?")
    assert next(stream) == "a "
    stream.close()
    assert pair.decoder.cancelled.wait(timeout=2)


def test_metadata_goes_with_every_call(connect: Connect, pair: FakePair) -> None:
    connect(ClientOptions(metadata=(("x-tenant", "shop"),))).ask("?", [RED])
    assert [metadata["x-tenant"] for metadata in pair.encoder.metadata] == ["shop", "shop"]


def test_the_callers_trace_goes_on(connect: Connect, pair: FakePair) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
        connect().ask("?", [RED, BLUE])
    trace_id = f"{span.get_span_context().trace_id:032x}"
    parents = [metadata["traceparent"] for metadata in pair.encoder.metadata]
    assert [parent.split("-")[1] for parent in parents] == [trace_id] * 3


def test_tokens_are_counted(connect: Connect) -> None:
    client = connect()
    count = client.count_tokens([Turn("user", (*client.ensure([RED]), "which?"))])
    assert (count.input_tokens, count.visual_tokens, count.context_tokens) == (50, 32, 4096)


def test_calls_go_where_health_says_serving(connect: Connect, pair: FakePair) -> None:
    """A decoder that loads or drains gets none, and gets them again when it serves."""
    client = connect()
    for health in pair.decoder_health:
        health.set(DECODER_SERVICE, HealthCheckResponse.NOT_SERVING)
    with pytest.raises(Unavailable):
        client.ask("?", timeout=0.5)
    assert pair.decoder.tasks == []
    pair.decoder_health[1].set(DECODER_SERVICE, HealthCheckResponse.SERVING)
    answers = [split(client.ask_stream("?", timeout=10))[1].text for _ in range(4)]
    assert answers == [TEXT] * 4


def test_without_a_server_the_error_says_so(connect: Connect) -> None:
    client = LenspairClient("127.0.0.1:1", "127.0.0.1:1")
    with pytest.raises(Unavailable) as error:
        client.ask("?", timeout=1)
    assert error.value.reason == ""
    client.close()


@pytest.mark.parametrize("client_class", [LenspairClient, Blocked])
def test_of_two_servers_one_may_be_gone_and_one_may_hang(client_class: Any, pair: FakePair) -> None:
    """A stopped process still takes connections up, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hangs = f"127.0.0.1:{silent.getsockname()[1]}"
        encoders = f"ipv4:127.0.0.1:1,{hangs},{pair.encoder_address}"
        client = client_class(encoders, f"ipv4:{hangs},{pair.decoder_address.removeprefix('ipv4:')}")
        answers = [client.ask("?", [picture], timeout=10).text for picture in (RED, BLUE)]
        client.close()
    assert answers == [TEXT] * 2


@pytest.mark.parametrize("client_class", [LenspairClient, Blocked])
def test_calls_to_a_server_that_falls_silent_go_to_the_other(client_class: Any, pair: FakePair) -> None:
    """Pings tell; without them an open call would wait for its deadline."""
    with fake_pair() as other, relay_to(_first_port(pair.decoder_address)) as relay:
        decoders = f"ipv4:127.0.0.1:{relay.port},127.0.0.1:{_first_port(other.decoder_address)}"
        client = client_class(pair.encoder_address, decoders, ClientOptions(keepalive_seconds=1.0))
        while not (pair.decoder.tasks and other.decoder.tasks):
            assert client.ask("?").repeated == 0
        relay.is_frozen.set()
        answers = [client.ask("?", timeout=25) for _ in range(4)]
        client.close()
    assert [answer.text for answer in answers] == [TEXT] * 4
    assert sum(answer.repeated for answer in answers) >= 1


def _first_port(address: str) -> int:
    return int(address.split(",", maxsplit=1)[0].rpartition(":")[2])
