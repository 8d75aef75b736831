"""The vocabulary carries any text, and our rendering of a conversation is the template's."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoProcessor

from demo.chat import conversation, image_part
from demo.tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"
CORE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(CHECKPOINT)


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_comes_back_in_its_composed_form(text: str) -> None:
    composed = CORE.normalizer.normalize_str(text)
    plain = Tokenizer.from_str(CORE.to_str())
    plain.encode_special_tokens = True
    assert plain.decode(plain.encode(composed).ids, skip_special_tokens=False) == composed


def test_qwens_special_tokens_are_single_tokens_in_qwens_order() -> None:
    tokens = (*SPECIAL_TOKENS, *PLAIN_TOKENS)
    ids = CORE.encode("".join(tokens)).ids
    assert [CORE.id_to_token(index) for index in ids] == list(tokens)
    assert ids == list(range(ids[0], ids[0] + len(ids)))


def test_common_words_of_our_answers_are_one_token() -> None:
    for word in (" circle", " triangle", " purple", "assistant", " second"):
        assert len(CORE.encode(word).ids) == 1


def test_the_processor_tokenizes_as_training_does(processor: Any) -> None:
    text = conversation((("What number is this?", "305"),), image_part(4), "Answer briefly.")
    assert processor.tokenizer(text)["input_ids"] == CORE.encode(text).ids


def test_the_template_renders_turns_with_pictures(processor: Any) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "a red circle"},
        {"role": "user", "content": "And its colour?"},
    ]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = (("What is it?", "a red circle"), ("And its colour?", ""))
    whole = conversation(turns, image_part(1), "Answer briefly.")
    assert rendered == whole.removesuffix("<|im_end|>\n")


def test_the_template_numbers_pictures_only_when_asked_to(processor: Any) -> None:
    content = [
        {"type": "image"},
        {"type": "image"},
        {"type": "video"},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_vision_id=True)
    assert "Picture 2: <|vision_start|>" in rendered
    assert "Video 1: <|vision_start|>" in rendered
    assert "Picture" not in processor.apply_chat_template(messages, tokenize=False)


def test_generation_stops_at_the_end_of_a_turn() -> None:
    text = (CHECKPOINT / "generation_config.json").read_text(encoding="utf-8")
    for token in ("<|im_end|>", "<|endoftext|>"):
        assert str(CORE.token_to_id(token)) in text
