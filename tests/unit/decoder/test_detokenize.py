"""Deltas never split a character and never show a stop sequence."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder_service.detokenize import Detokenizer, Vocabulary
from decoder_service.prompt import PromptBuilder

PIECES = ["alpha be", "ta gam", "ma", " delta", "beta gamma", "b", "be"]
SPECIAL = len(PIECES)
WORDS = Vocabulary(
    {piece.replace(" ", "Ġ"): number for number, piece in enumerate(PIECES)} | {"<|im_end|>": SPECIAL},
    {SPECIAL},
)
KOREAN_FAMILY = "삼겹살 👩‍👩‍👧 世界"


def deltas(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def test_words_come_as_they_are_made() -> None:
    assert deltas(Detokenizer(WORDS), [0, 1, 2, 3]) == ["alpha be", "ta gam", "ma", " delta", ""]


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    assert deltas(Detokenizer(WORDS), [5, SPECIAL, 999, 5]) == ["b", "", "", "b", ""]


def test_a_stop_sequence_over_several_chunks_never_shows() -> None:
    """G18."""
    detokenizer = Detokenizer(WORDS, ["beta gamma"])
    assert [detokenizer.add(token_id) for token_id in (0, 1)] == ["alpha ", ""]
    assert not detokenizer.is_stopped
    assert detokenizer.add(2) == ""
    assert detokenizer.is_stopped
    assert detokenizer.add(3) == ""
    assert detokenizer.finish() == ""


def test_what_only_looked_like_a_stop_sequence_is_released() -> None:
    assert deltas(Detokenizer(WORDS, ["beta gamma"]), [0, 3]) == ["alpha ", "be delta", ""]
    assert deltas(Detokenizer(WORDS, ["beta gamma"]), [0, 1]) == ["alpha ", "", "beta gam"]


def test_the_earliest_stop_wins() -> None:
    detokenizer = Detokenizer(WORDS, ["gamma", "eta"])
    assert deltas(detokenizer, [4]) == ["b", ""]


def test_a_stop_in_the_middle_of_a_token_cuts_it() -> None:
    detokenizer = Detokenizer(WORDS, ["ga"])
    assert deltas(detokenizer, [0, 1]) == ["alpha be", "ta ", ""]
    assert detokenizer.is_stopped


def test_repeated_beginnings_of_a_stop_are_seen() -> None:
    detokenizer = Detokenizer(WORDS, ["bbeta gamma"])
    assert "".join(deltas(detokenizer, [5, 5, 4])) == "b"
    assert detokenizer.is_stopped


def test_real_ids_of_emoji_and_hangul_join_to_the_whole(builder: PromptBuilder, processor: Any) -> None:
    """G20: two answers at once, token by token."""
    token_ids = processor.tokenizer.encode(KOREAN_FAMILY)
    assert len(token_ids) > len(KOREAN_FAMILY)
    first, second = builder.detokenizer(), builder.detokenizer()
    pairs = [(first.add(token_id), second.add(token_id)) for token_id in token_ids]
    for shown in map("".join, zip(*pairs, strict=True)):
        assert shown == KOREAN_FAMILY == processor.tokenizer.decode(token_ids)
        assert "\ufffd" not in shown


@pytest.mark.parametrize("cut", range(1, 4))
def test_an_answer_cut_inside_a_character_drops_it(builder: PromptBuilder, processor: Any, cut: int) -> None:
    """G22: the last message is valid UTF-8, without a replacement character."""
    token_ids = processor.tokenizer.encode("ok 👩")
    detokenizer = builder.detokenizer()
    shown = "".join(deltas(detokenizer, token_ids[:-cut]))
    assert shown in ("ok ", "ok")
    assert shown.encode().decode() == shown


def test_bytes_of_half_a_surrogate_pair_are_shown_as_text(builder: PromptBuilder, processor: Any) -> None:
    """G22: a model may say any bytes; a message can hold characters only."""
    bytes_of = {token: id_ for token, id_ in processor.tokenizer.get_vocab().items() if len(token) == 1}
    token_ids = [bytes_of[token] for token in ("a", "\u00ed", "\u0142", "\u0122", "b")]  # a ED A0 80 b
    shown = "".join(deltas(builder.detokenizer(), token_ids))
    assert shown.encode().decode() == shown == processor.tokenizer.decode(token_ids)
    assert (shown[0], shown[-1]) == ("a", "b")
    assert set(shown[1:-1]) == {"\ufffd"}


def test_a_resumed_answer_goes_on_at_the_right_character(builder: PromptBuilder, processor: Any) -> None:
    token_ids = processor.tokenizer.encode(KOREAN_FAMILY)
    whole = deltas(builder.detokenizer(), token_ids)
    for cut in range(len(token_ids)):
        resumed = builder.detokenizer()
        for token_id in token_ids[:cut]:
            resumed.add(token_id)
        assert deltas(resumed, token_ids[cut:]) == whole[cut:]


@given(token_ids=st.lists(st.integers(0, 959), max_size=40))
def test_any_tokens_join_to_what_the_tokenizer_decodes(
    builder: PromptBuilder, processor: Any, token_ids: list[int]
) -> None:
    """Also where the bytes are no UTF-8; only an incomplete last character may be missing."""
    shown = "".join(deltas(builder.detokenizer(), token_ids))
    decoded = processor.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert decoded in (shown, shown + "\ufffd")


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_sequences_cut_like_a_search_in_the_whole_text(text: str, stops: list[str]) -> None:
    letters = Vocabulary({"a": 0, "b": 1})
    detokenizer = Detokenizer(letters, stops)
    shown = "".join(deltas(detokenizer, ["ab".index(letter) for letter in text]))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first_end = min((end for end, _ in ends), default=None)
    starts = [start for end, start in ends if end == first_end]
    assert shown == (text[: min(starts)] if starts else text)
    assert detokenizer.is_stopped == bool(starts)
