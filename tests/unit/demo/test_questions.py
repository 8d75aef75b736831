"""Every answer follows from what is on the picture, and no held-out picture was trained on."""

import random

import pytest

from demo.curriculum import SIZES, STAGES, held_out, step_examples
from demo.evaluate import exam
from demo.questions import KINDS, NUMBER_WORDS, Example, make_example
from demo.small_talk import text_turn


def _examples(kind: str, count: int = 150) -> list[Example]:
    rng = random.Random(f"test/{kind}")
    return [make_example(kind, (rng.choice(SIZES), rng.choice(SIZES)), rng) for _ in range(count)]


def test_every_kind_has_examples_with_an_answer() -> None:
    for kind in KINDS:
        for example in _examples(kind, 30):
            assert example.kind == kind
            assert all(question and answer for question, answer in example.turns)
            assert not (example.pictures and example.clip)


def test_colour_and_shape_name_the_only_mark_that_fits() -> None:
    for kind in ("colour", "shape"):
        for example in _examples(kind):
            question, answer = example.turns[0]
            marks = example.pictures[0].marks
            if kind == "colour":
                fitting = [mark.colour for mark in marks if mark.what in question]
            else:
                fitting = [mark.what for mark in marks if mark.colour in question]
            assert fitting == [answer] or (len(marks) == 1 and not fitting)


def test_position_and_place_are_each_other_turned_round() -> None:
    for example in _examples("position"):
        assert example.turns[0][1] in {mark.zone for mark in example.pictures[0].marks}
    for example in _examples("place"):
        question, answer = example.turns[0]
        inside = [m for m in example.pictures[0].marks if f"the {m.zone}?" in question]
        assert [f"{m.colour} {m.what}" in answer for m in inside] == [True]


def test_counts_are_counted() -> None:
    for example in _examples("count"):
        question, answer = example.turns[0]
        words = question.lower().rstrip("?.").split()
        marks = example.pictures[0].marks
        count = sum(
            all(
                word in (mark.colour, f"{mark.what}s", f"{mark.what}es", "shapes")
                for word in words
                if word not in {"how", "many", "are", "there", "count", "the", "do", "you", "see"}
            )
            for mark in marks
        )
        assert NUMBER_WORDS[count] == answer


def test_a_name_in_an_exists_question_is_there_or_not() -> None:
    for example in _examples("exists"):
        question, answer = example.turns[0]
        there = any(mark.name in question for mark in example.pictures[0].marks)
        assert answer == ("yes" if there else "no")


def test_a_description_lists_all_marks_in_reading_order() -> None:
    for example in _examples("describe"):
        places = [example.turns[0][1].lower().find(mark.name) for mark in example.pictures[0].marks]
        assert places == sorted(places)
        assert min(places) >= 0


def test_numbers_are_read_from_left_to_right() -> None:
    for example in _examples("number"):
        marks = sorted(example.pictures[0].marks, key=lambda mark: mark.x)
        assert "".join(mark.what for mark in marks) == example.turns[0][1]


def test_only_one_of_two_pictures_has_what_is_asked_for() -> None:
    for example in _examples("which picture"):
        question, answer = example.turns[0]
        having = [any(mark.name in question for mark in picture.marks) for picture in example.pictures]
        assert having == [answer == "the first", answer == "the second"]


def test_the_answer_to_a_question_without_a_picture_depends_on_the_question_alone() -> None:
    rng = random.Random(1)
    answers: dict[str, str] = {}
    for _ in range(2000):
        question, answer = text_turn(rng)
        assert answers.setdefault(question, answer) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_examples_are_reproducible_and_end_with_one_question(kind: str) -> None:
    assert held_out(kind, 3, 1000) == held_out(kind, 3, 1000)
    assert len(exam(kind, 3, 1000).turns) == (2 if kind == "follow-up" else 1)


def test_held_out_pictures_are_not_among_those_trained_on() -> None:
    index = len(STAGES) - 1
    trained = {
        picture
        for step in range(60)
        for example in step_examples(STAGES[index], index, step, 1000)
        for picture in example.pictures
    }
    unseen = {
        picture for kind in KINDS for number in range(30) for picture in held_out(kind, number, 1000).pictures
    }
    assert trained
    assert unseen
    assert trained.isdisjoint(unseen)
