"""The `lenspair` command as a person uses it: a process, its output, its exit status."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import (
    FeatureRevisionMismatch,
    InvalidMedia,
    QueueFull,
    StoreUnavailable,
    TenantRequired,
)
from shared.pb.lenspair.decoder.v1.decoder_pb2 import PRIORITY_HIGH
from tests.rpc.fake_pair import FakePair, fake_pair, key_of

RED = b"a red picture"
TEXT = "a red cir\u00dfle"
COMMAND = [sys.executable, "-W", "error", "-m", "lenspair_client"]
SECONDS = 20


@pytest.fixture
def pair() -> Iterator[FakePair]:
    with fake_pair() as running:
        yield running


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    return path


def lenspair(*arguments: object, pair: FakePair | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command; the pair's addresses come from the environment."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(pair),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def environment(pair: FakePair | None) -> dict[str, str]:
    nowhere = "127.0.0.1:1"
    return os.environ | {
        "LENSPAIR_ENCODER": pair.encoder_address if pair else nowhere,
        "LENSPAIR_DECODER": pair.decoder_address if pair else nowhere,
        "PYTHONIOENCODING": "utf-8",
    }


def test_ask_prints_the_answer_and_nothing_else(pair: FakePair, picture: Path) -> None:
    done = lenspair("ask", "--image", picture, "which?", pair=pair)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{TEXT}\n", "")


def test_ask_passes_its_options_on(pair: FakePair, picture: Path) -> None:
    options = ["--max-tokens", 7, "--temperature", 0.5, "--seed", 3, "--stop", "x", "--system", "be brief"]
    assert lenspair("ask", "which?", *options, "--image", picture, pair=pair).returncode == 0
    (task,) = pair.decoder.tasks
    assert (task.max_output_tokens, task.sampling.temperature, task.sampling.seed) == (7, 0.5, 3)
    assert task.stop_sequences == ["x"]
    assert task.turns[0].parts[0].text == "be brief"


def test_ask_passes_every_rule_of_sampling_on(pair: FakePair) -> None:
    options = ["--top-p", 0.9, "--top-k", 5, "--min-p", 0.1, "--repetition-penalty", 1.1]
    options += ["--presence-penalty", 0.2, "--frequency-penalty", -0.3, "--priority", "high"]
    assert lenspair("ask", "which?", *options, pair=pair).returncode == 0
    (task,) = pair.decoder.tasks
    sampling = task.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 5, 0.1)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.1, 0.2, -0.3)
    assert task.priority == PRIORITY_HIGH


def test_ask_passes_the_form_of_the_answer_on(pair: FakePair, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for options in (
        ["--choice", "red", "--choice", "blue"],
        ["--regex", "[a-z]+"],
        ["--json-schema", schema],
    ):
        assert lenspair("ask", "which?", *options, pair=pair).returncode == 0
    choices, regex, json_schema = (task.output_format for task in pair.decoder.tasks)
    assert list(choices.choices.values) == ["red", "blue"]
    assert regex.regex == "[a-z]+"
    assert json_schema.json_schema == '{"type": "object"}'
    assert lenspair("ask", "which?", "--choice", "a", "--regex", "b", pair=pair).returncode == 2
    assert lenspair("ask", "which?", "--json-schema", tmp_path / "none", pair=pair).returncode == 2


def test_several_samples_are_numbered(pair: FakePair) -> None:
    done = lenspair("ask", "which?", "--samples", 2, pair=pair)
    assert done.stdout == f"1. {TEXT}\n2. another\n"
    assert pair.decoder.tasks[0].sample_count == 2


def test_verbose_adds_a_summary_without_colours_in_a_file(pair: FakePair, picture: Path) -> None:
    done = lenspair("ask", "--verbose", "--image", picture, "which?", pair=pair)
    assert done.stdout == f"{TEXT}\n"
    assert "pictures: encoded · 40 tokens in, 4 out" in done.stderr
    assert "\x1b" not in done.stderr


def test_json_is_one_object(pair: FakePair, picture: Path) -> None:
    answer = json.loads(lenspair("ask", "--json", "--image", picture, "which?", pair=pair).stdout)
    assert answer["text"] == TEXT
    assert answer["images"] == [{"file": str(picture), "outcome": "encoded", "tokens": 32}]
    assert (answer["input_tokens"], answer["output_tokens"]) == (40, 4)


def test_on_a_terminal_the_summary_is_dim_and_the_answer_harmless(pair: FakePair) -> None:
    """What a model writes may not steer a terminal."""
    pair.decoder.pieces = ("a ", "\x1b[2Jred", "\n\tsquare")
    outside, inside = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "ask", "which?"], env=environment(pair), stdout=inside, stderr=inside
    ) as process:
        assert process.wait(timeout=SECONDS) == 0
        os.close(inside)
        shown = os.read(outside, 10_000).decode()
        os.close(outside)
    assert "a \ufffd[2Jred\r\n\tsquare" in shown
    assert "\x1b[2m40 tokens in" in shown


def test_encode_and_lookup(pair: FakePair, picture: Path) -> None:
    missing = lenspair("lookup", picture, pair=pair)
    assert (missing.returncode, missing.stdout) == (1, f"{picture}: missing\n")
    assert lenspair("encode", picture, pair=pair).stdout.startswith(f"{picture}: encoded, 32 tokens")
    found = lenspair("lookup", "--json", picture, pair=pair)
    assert found.returncode == 0
    assert json.loads(found.stdout)["key"] == key_of(RED)


def test_metadata_goes_with_every_call(pair: FakePair, picture: Path) -> None:
    options = ["--metadata", "x-tenant=the shop=1", "--metadata", "x-other="]
    assert lenspair("ask", *options, "--image", picture, "which?", pair=pair).returncode == 0
    assert lenspair("store", "stats", *options, pair=pair).returncode == 0
    assert len(pair.encoder.metadata) == 3
    for metadata in pair.encoder.metadata:
        assert (metadata["x-tenant"], metadata["x-other"]) == ("the shop=1", "")


def test_a_feature_that_is_never_found_is_explained(pair: FakePair, picture: Path) -> None:
    pair.decoder.store = set()
    done = lenspair("ask", "--patience", 0, "--image", picture, "which?", pair=pair)
    assert done.returncode == 1
    assert "LENSPAIR_STORE_KEY" in done.stderr


def test_count(pair: FakePair, picture: Path) -> None:
    done = lenspair("count", "--image", picture, "which?", pair=pair)
    assert done.stdout == "50 tokens, 32 of them visual; the model's context holds 4096\n"
    assert json.loads(lenspair("count", "--json", "which?", pair=pair).stdout)["input_tokens"] == 50


@pytest.mark.parametrize("command", [[], ["ask"], ["encode"], ["lookup"], ["count"]])
def test_help_is_everywhere(command: list[str]) -> None:
    done = lenspair(*command, "--help")
    assert done.returncode == 0
    assert "exit status" in done.stdout
    assert not command or "3.0 by default" in done.stdout


def test_without_a_pair_it_says_what_to_do() -> None:
    done = lenspair("ask", "which?")
    assert done.returncode == 3
    assert "Is the pair running? `make up` starts one." in done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreadable_file_is_named(pair: FakePair, tmp_path: Path) -> None:
    done = lenspair("ask", "--image", tmp_path / "nope.png", "which?", pair=pair)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lenspair: can't read {tmp_path / 'nope.png'}: No such file or directory\n"
    assert lenspair("encode", tmp_path, pair=pair).stderr.endswith("Is a directory\n")


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (InvalidMedia("no picture", field="media.data"), 1, "no picture"),
        (QueueFull("full", retry_after_seconds=300), 1, "try again in 300.0 seconds"),
        (StoreUnavailable("no answer"), 3, "LENSPAIR_STORE_URL"),
        (FeatureRevisionMismatch("another checkpoint"), 1, "the same checkpoint"),
        (TenantRequired("who?", field="metadata.X-Tenant"), 1, "--metadata x-tenant=TENANT"),
    ],
)
def test_errors_are_explained(
    pair: FakePair, picture: Path, error: Exception, code: int, advice: str
) -> None:
    pair.encoder.errors.extend([error] * 50)  # type: ignore[list-item]
    done = lenspair("encode", "--patience", 0.3, picture, pair=pair)
    assert done.returncode == code
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", 2**70],
        ["--max-tokens", 2**40],
        ["--timeout", 0],
        ["--timeout", "nan"],
        ["--timeout", 1e17],
        ["--temperature", "x"],
        ["--metadata", "no-value"],
        ["--metadata", "X-Tenant=upper"],
        ["--metadata", "x-tenant=line\nfeed"],
        ["--metadata", "x-tenant-bin=bytes"],
    ],
)
def test_impossible_numbers_are_refused(pair: FakePair, arguments: list[object]) -> None:
    done = lenspair("ask", *arguments, "which?", pair=pair)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_out_of_time(pair: FakePair) -> None:
    pair.decoder.hangs_after = 1
    done = lenspair("ask", "--timeout", 0.5, "which?", pair=pair)
    assert done.returncode == 4
    assert "--timeout gives it more time" in done.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore interrupts, and so would a command that the tests start in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_call_without_a_traceback(pair: FakePair) -> None:
    pair.decoder.hangs_after = 1
    with subprocess.Popen(
        [*COMMAND, "ask", "which?"], env=environment(pair), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"a "
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert errors.decode() == "lenspair: interrupted\n"
    assert pair.decoder.cancelled.wait(timeout=2)


def test_a_reader_who_leaves_ends_the_call_quietly(pair: FakePair) -> None:
    pair.decoder.pieces = ["word "] * 20_000
    with subprocess.Popen(
        [*COMMAND, "ask", "which?"], env=environment(pair), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=SECONDS) == 141
    assert errors == b""
