"""Forms of answers: what is refused, what is allowed at each place, and where it is computed."""

import asyncio
import contextlib
import json
import random
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from decoder_service.grammars import MAX_REMEMBERED, AnswerGrammar, Grammars
from decoder_service.output_format import (
    MAX_CHOICE_CHARACTERS,
    MAX_CHOICES,
    MAX_REGEX_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    OutputFormat,
)
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import InvalidRequest

CHECKPOINT = open_checkpoint(str(DEMO_CHECKPOINT))
TOKENIZER = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
ENDS = CHECKPOINT.stop_token_ids()
VOCABULARY = 1000  # more than the tokenizer has: a padded matrix
SPECIAL = {id_ for id_, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(TOKENIZER.to_str(), vocab_size=VOCABULARY, end_ids=ENDS)
    yield made
    made.close()


def schema(value: Any) -> OutputFormat:
    return OutputFormat("json_schema", (json.dumps(value),))


def regex(text: str) -> OutputFormat:
    return OutputFormat("regex", (text,))


def choices(*values: str) -> OutputFormat:
    return OutputFormat("choices", values)


def allowed(grammar: AnswerGrammar) -> set[int]:
    bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
    return {int(token_id) for token_id in bits.nonzero()[0]}


def walk(grammar: AnswerGrammar, rng: random.Random, most: int = 300) -> tuple[list[int], bool]:
    """Tokens at random among those that are allowed, until an end; and whether one came."""
    tokens: list[int] = []
    while len(tokens) < most:
        options = allowed(grammar)
        assert options
        assert options <= set(range(TOKENIZER.get_vocab_size()))
        assert not options & (SPECIAL - ENDS)
        token_id = rng.choice(sorted(options))
        grammar.accept(token_id)
        if token_id in ENDS:
            return tokens, True
        tokens.append(token_id)
    return tokens, False


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    "pattern", ["[a-z]{1,5}", "(red|green) (circle|square)", "[0-9]{4}-[0-9][0-9]", "ja|nein|żółw"]
)
async def test_whatever_is_chosen_matches_the_expression(grammars: Grammars, pattern: str) -> None:
    for seed in range(30):
        tokens, has_ended = walk(await grammars.begin(regex(pattern), ()), random.Random(seed))
        assert has_ended
        assert re.fullmatch(pattern, text_of(tokens))


async def test_whatever_is_chosen_has_the_schema(grammars: Grammars) -> None:
    form = schema(
        {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green"]},
                "count": {"type": "integer", "minimum": 0, "maximum": 99},
                "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["colour", "count"],
            "additionalProperties": False,
        }
    )
    for seed in range(30):
        tokens, has_ended = walk(await grammars.begin(form, ()), random.Random(seed))
        assert has_ended
        value = json.loads(text_of(tokens))
        assert value["colour"] in ("red", "green")
        assert 0 <= value["count"] <= 99
        assert set(value) <= {"colour", "count", "tags"}


async def test_choices_are_taken_word_for_word(grammars: Grammars) -> None:
    """Also those that look like grammar, special tokens or another one's beginning."""
    values = ("red", "red circle", 'a "quoted" \\ one', "<|im_end|>", "start: x | y", "żółw 🐢", "two\nlines")
    found = set()
    for seed in range(200):
        tokens, has_ended = walk(await grammars.begin(choices(*values), ()), random.Random(seed))
        assert has_ended
        found.add(text_of(tokens))
    assert found == set(values)


async def test_a_complete_answer_may_only_end(grammars: Grammars) -> None:
    grammar = await grammars.begin(choices("a"), ())
    [token_id] = allowed(grammar) - ENDS
    grammar.accept(token_id)
    assert allowed(grammar) == ENDS


@pytest.mark.parametrize("cut", [1, 3])
async def test_a_resumed_answer_goes_on_as_if_never_cut(grammars: Grammars, cut: int) -> None:
    form = regex("(red|green) (circle|square)")
    tokens, _ = walk(await grammars.begin(form, ()), random.Random(1))
    whole = await grammars.begin(form, ())
    for token_id in tokens[:cut]:
        whole.accept(token_id)
        whole.mask()
    assert allowed(await grammars.begin(form, tokens[:cut])) == allowed(whole)


async def test_a_continuation_of_another_form_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.begin(regex("[0-9]+"), TOKENIZER.encode("red", add_special_tokens=False).ids)
    assert caught.value.field == "task.continuation_token_ids"


@pytest.mark.parametrize(
    "form",
    [
        regex("a("),
        regex("(?=a)b"),
        regex(r"(a)\1"),
        regex(""),
        regex("a" * (MAX_REGEX_CHARACTERS + 1)),
        OutputFormat("json_schema", ("",)),
        OutputFormat("json_schema", ("[1, 2]",)),
        OutputFormat("json_schema", ("{",)),
        OutputFormat("json_schema", ("[" * 60_000,)),
        OutputFormat("json_schema", (" " * (MAX_SCHEMA_CHARACTERS + 1),)),
        schema({"type": "strin"}),
        schema({"not": {"type": "string"}}),
        schema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
        schema({"$ref": "http://127.0.0.1:1/schema"}),
        schema({"$ref": "file:///etc/passwd"}),
        schema({"type": "string", "pattern": "(?=x)"}),
        choices(),
        choices(""),
        choices("a", "a"),
        choices("a" * (MAX_CHOICE_CHARACTERS + 1)),
        choices(*map(str, range(MAX_CHOICES + 1))),
    ],
)
async def test_what_no_grammar_can_be_made_of_is_refused_by_name(
    grammars: Grammars, form: OutputFormat
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await grammars.begin(form, ())
    assert caught.value.field == form.field
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "pattern",
    ["(((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}){1,99})", "(a+)+(b|a+)*c{1,100000}", "(.*a){50}"],
)
async def test_an_expression_that_explodes_is_followed_or_given_up_in_bounded_time(
    grammars: Grammars, pattern: str
) -> None:
    async with asyncio.timeout(20):
        grammar = await grammars.begin(regex(pattern), ())
        with contextlib.suppress(InvalidRequest):
            await asyncio.to_thread(walk, grammar, random.Random(0))
    assert allowed(await grammars.begin(choices("a"), ()))


def chained(depth: int, nesting: int) -> dict[str, Any]:
    """Definitions that refer to one another, each `nesting` levels deep."""

    def nested(inner: dict[str, Any]) -> dict[str, Any]:
        for _ in range(nesting):
            inner = {"anyOf": [inner]}
        return inner

    definitions = {f"a{i}": nested({"$ref": f"#/$defs/a{i + 1}"}) for i in range(depth)}
    return {"$defs": {**definitions, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(schema(chained(150, 25)), id="references that use up the stack"),
        pytest.param(
            schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}),
            id="a hundred million states",
        ),
        pytest.param(
            schema({"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109)]}),
            id="more states still",
        ),
        pytest.param(schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), id="a circle"),
        pytest.param(schema({"type": "integer", "minimum": -(10**300)}), id="a number beyond 64 bits"),
        pytest.param(schema({"type": "integer", "maximum": 10**3000}), id="a number beyond a double"),
        pytest.param(
            schema(
                {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(2)]} for i in range(20)]}
            ),
            id="a product of alternatives",
        ),
    ],
)
async def test_a_form_that_would_harm_the_process_is_refused(grammars: Grammars, form: OutputFormat) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(InvalidRequest) as caught:
            await grammars.begin(form, ())
    assert caught.value.field == form.field
    assert allowed(await grammars.begin(choices("a"), ()))


async def test_a_form_just_inside_the_check_is_compiled(grammars: Grammars) -> None:
    """What the check lets through, the decoder survives: it has the larger stack."""
    for nesting in range(1, 25, 4):
        with contextlib.suppress(InvalidRequest):
            walk(await grammars.begin(schema(chained(100, nesting)), ()), random.Random(0))
    assert allowed(await grammars.begin(schema(chained(100, 1)), ()))


async def test_masks_are_computed_on_threads_of_their_own(grammars: Grammars) -> None:
    await grammars.begin(regex("[a-z]+"), ())
    names = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    assert {"grammar-compiler", "grammar-masks"} <= names


async def test_answers_of_one_form_do_not_disturb_each_other(grammars: Grammars) -> None:
    form = choices("red", "green")
    first, second = await grammars.begin(form, ()), await grammars.begin(form, ())
    before = allowed(second)
    first.accept(min(allowed(first)))
    first.mask()
    assert allowed(second) == before


async def test_only_so_many_forms_are_remembered(grammars: Grammars) -> None:
    for number in range(MAX_REMEMBERED + 20):
        await grammars.begin(choices(str(number)), ())
    assert len(grammars._compiled) == MAX_REMEMBERED
    assert allowed(await grammars.begin(choices("0"), ()))
