"""The fault test's own arithmetic: a lost or wrong request is seen, and counted for the right fault."""

import io
import json
import random
from pathlib import Path

from PIL import Image

from bench.fault_load import Record
from bench.fault_questions import questions, with_comment
from bench.fault_report import Counts, Window, by_fault, counts, problems, table, write
from bench.requests import picture

WINDOWS = [Window("killed", 10, 15), Window("stopped", 20, 25), Window("killed", 30, 35)]
CALM = Record(1, 2, "text")
RETRIED = Record(14, 16, "text", repeated=3, resumed=1)
LOST = Record(19, 26, "text", error="UNAVAILABLE: gone")
WRONG = Record(31, 32, "text", difference="'a', expected 'b'")
ALL = [CALM, RETRIED, LOST, WRONG]


def test_requests_are_counted() -> None:
    assert counts(ALL) == Counts(4, 1, 1, 1, 1, 7.0)
    assert counts([]) == Counts(0, 0, 0, 0, 0, 0.0)


def test_a_request_belongs_to_the_fault_that_it_met() -> None:
    groups = by_fault([*ALL, Record(14, 22, "met two")], WINDOWS)
    assert groups["calm"] == [CALM]
    assert groups["killed"] == [RETRIED, WRONG, Record(14, 22, "met two")]
    assert groups["stopped"] == [LOST]


def test_what_is_lost_or_wrong_is_a_problem() -> None:
    assert problems([CALM, RETRIED, Record(21, 22, "text")], WINDOWS) == []
    lost, wrong = problems(ALL, WINDOWS)
    assert "gone" in lost
    assert "expected 'b'" in wrong


def test_a_fault_that_met_no_request_proves_nothing() -> None:
    assert problems([CALM, RETRIED], WINDOWS) == ["stopped: no request ran meanwhile"]


def test_the_table_and_the_file_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "results" / "faults.json"
    write(path, ALL, WINDOWS)
    result = json.loads(path.read_text())
    assert result["injected"] == {"killed": 2, "stopped": 1}
    assert (result["requests"], result["lost"], result["wrong"], result["retried"]) == (4, 1, 1, 1)
    assert result["worst_latency_seconds"] == 7.0
    assert result["by_fault"]["stopped"]["lost"] == 1
    row = next(line for line in table(ALL, WINDOWS).splitlines() if line.startswith("stopped"))
    assert row.split()[1:4] == ["1", "1", "1"]


def test_a_new_picture_has_other_bytes_and_equal_pixels() -> None:
    (known,) = [known for known in questions(4, seed=1) if len(known.images) == 1][:1]
    new = known.with_new_pictures(5)
    assert new.images != known.images
    for before, after in zip(known.images, new.images, strict=True):
        opened = [Image.open(io.BytesIO(data)) for data in (before, after)]
        assert opened[0].tobytes() == opened[1].tobytes()
        assert opened[1].info["Comment"] == "5"


def test_comments_keep_a_picture_valid() -> None:
    data = with_comment(picture(random.Random(0)), "x" * 100)
    with Image.open(io.BytesIO(data)) as image:
        image.verify()


def test_questions_are_of_all_kinds() -> None:
    some = questions(12, seed=7)
    assert {len(known.images) for known in some} == {0, 1, 2}
    assert {known.generation.temperature for known in some} == {None, 0.8}
