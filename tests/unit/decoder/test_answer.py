"""Tokens become pieces; a continuation is counted, and its text is not sent again."""

from decoder_service.answer import Answer, ending_of
from decoder_service.detokenize import Detokenizer, Vocabulary
from decoder_service.engine.engine import Prompt, TokenOutput

VOCABULARY = Vocabulary({"one": 1, "Ġtwo": 2, "Ġthree": 3})
PROMPT = Prompt((7, 8), ((0, 0, 0), (1, 1, 1)), 2)


def _answer(*continuation: int, stops: tuple[str, ...] = ()) -> Answer:
    return Answer(Detokenizer(VOCABULARY, stops), continuation)


def test_pieces_are_the_text() -> None:
    answer = _answer()
    pieces = [answer.add([TokenOutput(1)]), answer.add([TokenOutput(2, finish="length")])]
    assert [piece.text for piece in pieces] == ["one", " two"]
    assert answer.finish == "length"


def test_the_end_token_is_no_piece_of_the_answer() -> None:
    answer = _answer()
    answer.add([TokenOutput(1)])
    piece = answer.add([TokenOutput(None, finish="stop")])
    assert piece.text == ""
    assert piece.tokens == ()
    assert answer.ending().output_tokens == 1


def test_a_stop_sequence_ends_the_answer_before_itself() -> None:
    answer = _answer(stops=("e two",))
    text = answer.add([TokenOutput(1)]).text + answer.add([TokenOutput(2)]).text
    assert text == "on"
    assert answer.finish == "stop"


def test_text_that_was_held_back_comes_at_the_end() -> None:
    answer = _answer(stops=("one two three four",))
    assert answer.add([TokenOutput(1)]).text == ""
    assert answer.add([TokenOutput(2, finish="length")]).text == "one two"


def test_a_resumed_answer_goes_on_at_the_right_character() -> None:
    whole, resumed = _answer(stops=("two three",)), _answer(1, stops=("two three",))
    first = whole.add([TokenOutput(1)]).text
    rest = [TokenOutput(2), TokenOutput(1, finish="length")]
    assert first == "one"
    assert [whole.add([output]).text for output in rest] == [resumed.add([output]).text for output in rest]
    assert resumed.ending().output_tokens == 3


def test_a_continuation_that_holds_the_stop_is_finished() -> None:
    assert _answer(1, 2, stops=("two",)).finish == "stop"


def test_times_count_from_arrival_and_submission() -> None:
    answer = _answer()
    answer.add([TokenOutput(1, finish="length")])
    answer.timings.submitted = 11.0
    answer.timings.first_scheduled, answer.timings.first_token = 11.5, 13.0
    ending = ending_of([answer], PROMPT, arrived=10.0)
    assert (ending.time_to_first_token, ending.queue_time) == (3.0, 0.5)
    assert (ending.input_tokens, ending.visual_tokens) == (2, 0)


def test_of_several_samples_the_first_token_of_any_counts_and_tokens_add_up() -> None:
    answers = [Answer(Detokenizer(VOCABULARY, ()), (), index) for index in (3, 4)]
    for answer, first_token in zip(answers, (12.0, 11.0), strict=True):
        piece = answer.add([TokenOutput(1), TokenOutput(2, finish="length")])
        assert piece.text == "one two"
        answer.timings.first_token = first_token
    assert piece.sample_index == 4
    ending = ending_of(answers, PROMPT, arrived=10.0)
    assert (ending.time_to_first_token, ending.output_tokens) == (1.0, 4)
    assert [(each.sample_index, each.finish) for each in ending.samples] == [(3, "length"), (4, "length")]
