"""Answers of a given form through the real engine, beside neighbours of other forms and of none."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from decoder_service.engine.engine import GenerationRequest, Limits, Sampling, TokenOutput
from decoder_service.grammars import Grammars
from decoder_service.output_format import OutputFormat
from shared.checkpoint import open_checkpoint
from shared.errors import InvalidRequest
from tests.unit.engine.fake_runner import collect
from tests.unit.engine.reference import Question, Reference
from tests.unit.engine.test_equality import QUESTIONS, running

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Form:
    format: OutputFormat
    fits: Callable[[str], object]


FORMS = [
    Form(OutputFormat("regex", (r"[a-z]{2,8} \d\d",)), re.compile(r"[a-z]{2,8} \d\d").fullmatch),
    Form(
        OutputFormat("choices", ("red", "a green one", "żółw")), {"red", "a green one", "żółw"}.__contains__
    ),
    Form(
        OutputFormat("json_schema", (json.dumps(SCHEMA),)),
        lambda text: json.loads(text)["colour"] in ("red", "green", "blue"),
    ),
]


class Broken:
    """A form that gets too complex at once."""

    def mask(self) -> NDArray[np.int32]:
        raise InvalidRequest("too complex", field="task.output_format.regex")

    def accept(self, token_id: int) -> None:
        raise AssertionError(token_id)


@pytest.fixture
async def grammars(reference: Reference) -> AsyncIterator[Grammars]:
    ends = open_checkpoint(str(reference.path)).stop_token_ids()
    tokenizer = Tokenizer.from_file(str(reference.path / "tokenizer.json"))
    made = Grammars(tokenizer.to_str(), vocab_size=960, end_ids=ends)
    yield made
    made.close()


async def formed(
    reference: Reference, grammars: Grammars, name: str, form: Form, *, sampling: Sampling, most: int = 60
) -> GenerationRequest:
    ends = open_checkpoint(str(reference.path)).stop_token_ids()
    request = reference.request(
        name, QUESTIONS[1], sampling=sampling, limits=Limits(most, stop_token_ids=ends)
    )
    return replace(request, grammar=await grammars.begin(form.format, ()))


def text_of(reference: Reference, outputs: list[TokenOutput]) -> str:
    tokenizer = Tokenizer.from_file(str(reference.path / "tokenizer.json"))
    tokens = [output.token_id for output in outputs if output.token_id is not None]
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_sixteen_answers_have_their_forms_and_their_neighbours_stay_as_alone(
    reference: Reference, grammars: Grammars, temperature: float
) -> None:
    free = Question((), "hello")
    expected = reference.ask(free)
    async with running(reference.engine(size=32)) as engine:
        requests = [
            await formed(
                reference,
                grammars,
                str(number),
                FORMS[number % len(FORMS)],
                sampling=Sampling(temperature=temperature, seed=number),
            )
            for number in range(16)
        ]
        neighbours = [reference.request(f"free {number}", free) for number in range(4)]
        answers = await asyncio.gather(*(collect(engine, each) for each in [*requests, *neighbours]))
    for number, answer in enumerate(answers[:16]):
        assert answer[-1].finish == "stop"
        assert FORMS[number % len(FORMS)].fits(text_of(reference, answer))
    assert all(expected.is_met_by(answer) for answer in answers[16:])


async def test_an_interrupted_answer_keeps_its_form(reference: Reference, grammars: Grammars) -> None:
    sampling = Sampling(temperature=1.0, seed=4)
    form = Form(OutputFormat("regex", ("[a-z ]{120,140}",)), re.compile("[a-z ]{120,140}").fullmatch)

    async def answers(blocks: int) -> tuple[list[list[TokenOutput]], int]:
        engine = reference.engine(blocks=blocks)
        requests = [
            await formed(reference, grammars, str(n), form, sampling=sampling, most=90) for n in range(3)
        ]
        async with running(engine):
            given = await asyncio.gather(*(collect(engine, request) for request in requests))
        return given, engine.stats().preempted

    whole, _ = await answers(200)
    cut, preempted = await answers(8)
    assert preempted > 0
    assert cut == whole
    assert all(form.fits(text_of(reference, answer)) for answer in cut)


async def test_a_form_that_can_not_be_followed_ends_its_request_alone(reference: Reference) -> None:
    expected = reference.ask(QUESTIONS[0])
    broken = replace(reference.request("broken", QUESTIONS[1]), grammar=Broken())
    async with running(reference.engine()) as engine:
        answers = await asyncio.gather(
            collect(engine, reference.request("good", QUESTIONS[0])),
            collect(engine, broken),
            return_exceptions=True,
        )
        assert engine.stats().running == 0
    assert isinstance(answers[1], InvalidRequest)
    assert isinstance(answers[0], list)
    assert expected.is_met_by(answers[0])
