"""Stored features through the client library, blocking and asyncio, and through `lenspair store`."""

import json
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from lenspair_client import InvalidArgument, LenspairClient, RequestCounts, StoreStats
from shared.errors import Draining, InvalidRequest, MalformedFeatureKey, StoreUnavailable
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from tests.rpc.fake_pair import FakePair, fake_pair
from tests.rpc.test_cli import lenspair
from tests.rpc.test_client import Blocked

FAR = datetime.fromtimestamp(4_000_000_000, UTC)
PAST = datetime.fromtimestamp(1_000_000_000, UTC)


@pytest.fixture
def pair() -> Iterator[FakePair]:
    with fake_pair() as running:
        yield running


@pytest.fixture(params=[LenspairClient, Blocked], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, pair: FakePair) -> Iterator[Any]:
    connected = request.param(pair.encoder_address, pair.decoder_address, None)
    yield connected
    connected.close()


# --- the library ------------------------------------------------------------------------------------


def test_keep_alive_takes_features_and_keys(client: Any, pair: FakePair) -> None:
    feature = client.encode(b"red")
    assert client.keep_alive([feature, "nope", feature.key], 90.25) == (FAR, None, FAR)
    assert pair.encoder.times_to_live == [90.25]


def test_evict_tells_what_was_there(client: Any, pair: FakePair) -> None:
    feature = client.encode(b"red")
    assert client.evict([feature, "nope"]) == (True, False)
    assert client.evict([feature.key]) == (False,)
    assert pair.encoder.store == set()


def test_describe_tells_what_is_known(client: Any) -> None:
    feature = client.encode(b"red")
    missing, described = client.describe(["nope", feature])
    assert missing is None
    assert (described.feature.key, described.feature.grid) == (feature.key, (1, 8, 16))
    assert (described.feature.expires_at, described.created_at) == (FAR, PAST)
    assert (described.dtype, described.num_chunks) == ("bfloat16", 4)
    assert (described.hidden_size, described.deepstack_levels) == (24, 3)
    assert described.fingerprint == "f" * 64


def test_stats_leave_out_what_is_not_known(client: Any, pair: FakePair) -> None:
    empty = RequestCounts(None, 0, 0, 0, 0, None)
    assert client.store_stats() == StoreStats(0, 0, 0, None, None, None, None, empty, None, None)
    pair.encoder.stats.CopyFrom(SOME_STATS)
    counts = RequestCounts(PAST, 6, 2, 2, 1, 0.8)
    assert client.store_stats() == StoreStats(3, 50_400_000, 1, PAST, PAST, FAR, FAR, counts, 10**9, 0)


def test_many_keys_go_in_calls_of_a_legal_size(client: Any, pair: FakePair) -> None:
    keys = [f"key-{number}" for number in range(300)]
    pair.encoder.store.update(keys[:150])
    assert client.describe([]) == ()
    assert client.keep_alive(keys, 5).count(FAR) == 150
    assert client.describe(keys)[150:] == (None,) * 150
    assert client.evict(keys) == (True,) * 150 + (False,) * 150
    assert pair.encoder.calls == [
        *["KeepAlive"] * 2,
        *["DescribeFeatures"] * 2,
        *["Evict"] * 2,
    ]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e30])
def test_times_that_no_message_holds_are_refused_here(client: Any, pair: FakePair, seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        client.keep_alive(["key"], seconds)
    assert pair.encoder.calls == []


@pytest.mark.parametrize("seconds", [0, -1, -0.5, 1e-9])
def test_what_else_is_no_time_is_for_the_encoder_to_say(client: Any, pair: FakePair, seconds: float) -> None:
    pair.encoder.errors.append(InvalidRequest("time_to_live must be above 0", field="time_to_live"))
    with pytest.raises(InvalidArgument) as caught:
        client.keep_alive(["key"], seconds)
    assert caught.value.field == "time_to_live"


ASK: list[Callable[[Any], Any]] = [
    lambda client: client.keep_alive(["key"], 1),
    lambda client: client.evict(["key"]),
    lambda client: client.describe(["key"]),
    lambda client: client.store_stats(),
]


@pytest.mark.parametrize("ask", ASK)
def test_an_encoder_that_goes_away_is_asked_again(
    client: Any, pair: FakePair, ask: Callable[[Any], Any]
) -> None:
    pair.encoder.errors.append(Draining("this server shuts down"))
    ask(client)
    assert len(pair.encoder.calls) == 2


# --- the command ------------------------------------------------------------------------------------

SOME_STATS = pb.GetStoreStatsResponse(
    entry_count=3,
    size_bytes=50_400_000,
    damaged_count=1,
    oldest_create_time=Timestamp(seconds=1_000_000_000),
    newest_create_time=Timestamp(seconds=1_000_000_000),
    first_expire_time=Timestamp(seconds=4_000_000_000),
    last_expire_time=Timestamp(seconds=4_000_000_000),
    requests=pb.RequestCounts(
        start_time=Timestamp(seconds=1_000_000_000),
        hit_count=6,
        joined_count=2,
        encoded_count=2,
        miss_count=1,
        hit_rate=0.8,
    ),
    store_used_bytes=10**9,
    store_max_bytes=0,
)


def test_stats_are_aligned_lines(pair: FakePair) -> None:
    pair.encoder.stats.CopyFrom(SOME_STATS)
    done = lenspair("store", "stats", pair=pair)
    assert done.returncode == 0
    rows = {line[:15].rstrip(): line[15:] for line in done.stdout.splitlines()}
    assert (rows["features"], rows["size"], rows["damaged"]) == ("3", "50.4 MB", "1")
    assert rows["oldest made"].startswith("2001-09-09 01:46:40 UTC, ")
    assert rows["oldest made"].endswith(" ago")
    assert rows["last expires"].startswith("2096-10-02 07:06:40 UTC, in ")
    counts = "6 hits, 2 joined, 2 encoded, 1 missed, hit rate 80 %, since 2001-09-09 01:46:40 UTC"
    assert rows["this encoder"] == counts
    assert rows["store memory"] == "1 GB without a limit"


def test_stats_of_an_empty_store(pair: FakePair) -> None:
    shown = lenspair("store", "stats", pair=pair).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["features", "size", "damaged", "this"]
    assert "no request yet" in shown


def test_stats_as_json(pair: FakePair) -> None:
    pair.encoder.stats.CopyFrom(SOME_STATS)
    stats = json.loads(lenspair("store", "stats", "--json", pair=pair).stdout)
    assert (stats["entries"], stats["oldest"], stats["store_max_bytes"]) == (3, PAST.isoformat(), 0)
    assert stats["requests"]["hit_rate"] == 0.8


def test_show(pair: FakePair) -> None:
    pair.encoder.store.add("key-1")
    done = lenspair("store", "show", "key-1", pair=pair)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "key         key-1",
        "grid        1 x 8 x 16",
        "tokens      32",
        "tensor      bfloat16, 4 x 24 wide",
        "size        4.1 kB in 4 chunks",
    ]
    assert lines[-1] == f"checkpoint  {'f' * 64}"


def test_show_tells_what_is_missing(pair: FakePair) -> None:
    pair.encoder.store.add("key-1")
    done = lenspair("store", "show", "--json", "key-1", "key-2", pair=pair)
    assert done.returncode == 1
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["stored"], first["num_chunks"], first["expires_at"]) == (True, 4, FAR.isoformat())
    assert second == {"key": "key-2", "stored": False}
    assert lenspair("store", "show", "key-2", pair=pair).stdout == "key-2: missing\n"


def test_evict(pair: FakePair) -> None:
    pair.encoder.store.add("key-1")
    done = lenspair("store", "evict", "key-1", "key-2", pair=pair)
    assert (done.returncode, done.stdout) == (0, "key-1: evicted\nkey-2: was not there\n")
    assert pair.encoder.store == set()
    again = lenspair("store", "evict", "--json", "key-1", pair=pair)
    assert json.loads(again.stdout) == {"key": "key-1", "existed": False}


def test_keep(pair: FakePair) -> None:
    pair.encoder.store.add("key-1")
    done = lenspair("store", "keep", "key-1", "--for", "1h30m", pair=pair)
    assert (done.returncode, done.stdout) == (0, "key-1: until 2096-10-02 07:06:40 UTC\n")
    some = lenspair("store", "keep", "--json", "key-1", "key-2", "--seconds", "0.5", pair=pair)
    assert some.returncode == 1
    expected = [{"key": "key-1", "expires_at": FAR.isoformat()}, {"key": "key-2", "expires_at": None}]
    assert list(map(json.loads, some.stdout.splitlines())) == expected
    assert pair.encoder.times_to_live == [5400, 0.5]


@pytest.mark.parametrize(
    "arguments",
    [
        ["keep", "key"],
        ["keep", "key", "--for", "2"],
        ["keep", "key", "--for", "nan"],
        ["keep", "key", "--for", "2h", "--seconds", 3],
        ["keep", "key", "--seconds", "nan"],
        ["keep", "key", "--seconds", "inf"],
        ["keep", "key", "--seconds", 1e30],
        ["keep", "--for", "2h"],
        ["show"],
        ["evict"],
        ["flush"],
        [],
    ],
)
def test_commands_that_can_not_be(pair: FakePair, arguments: list[object]) -> None:
    done = lenspair("store", *arguments, pair=pair)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert pair.encoder.calls == []


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (InvalidRequest("too long: at most 86400 seconds", field="time_to_live"), 1, "at most 86400 seconds"),
        (MalformedFeatureKey("not a feature key", field="keys[0]"), 1, "The field at fault is keys[0]."),
        (StoreUnavailable("no answer"), 3, "LENSPAIR_STORE_URL"),
    ],
)
def test_errors_are_explained(pair: FakePair, error: Exception, code: int, advice: str) -> None:
    pair.encoder.errors.extend([error] * 50)  # type: ignore[list-item]
    done = lenspair("store", "keep", "key", "--for", "1d", "--patience", 0.3, pair=pair)
    assert done.returncode == code
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [["store"], *(["store", action] for action in ("stats", "show", "evict", "keep"))]
)
def test_help_is_everywhere(command: list[str]) -> None:
    done = lenspair(*command, "--help")
    assert done.returncode == 0
    assert "exit status" in done.stdout
