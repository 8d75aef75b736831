"""What the decoder remembers of prompts saves work and never answers about another picture."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from PIL import Image, ImageDraw

from demo.pair import Pair
from lenspair_client import FeatureNotFound, Generation, InvalidArgument, LenspairClient, Turn
from lenspair_client.options import ClientOptions

COLOURS = ("red", "green", "blue", "yellow")
QUESTION = "What colour is the circle?"


@pytest.fixture
def client(pair: Pair) -> Iterator[LenspairClient]:
    with LenspairClient(pair.encoder.address, pair.decoder.address) as connected:
        yield connected


def circle(colour: str, size: int = 96, *, offset: int = 0) -> bytes:
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((24 + offset, 24, 72 + offset, 72), fill=colour)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def test_a_repeated_question_reuses_its_prompt_and_says_so(client: LenspairClient) -> None:
    image = circle("red", offset=1)
    first, second = (client.ask(QUESTION, [image]) for _ in range(2))
    assert first.text == second.text == "red"
    assert second.usage.reused_tokens > 0.4 * second.usage.input_tokens
    assert second.usage.input_tokens == first.usage.input_tokens


def test_pictures_of_one_size_behind_the_same_words_are_told_apart(client: LenspairClient) -> None:
    """G06: equal tokens and positions, whatever was asked before, alone and one after the other."""
    for _ in range(3):
        assert [client.ask(QUESTION, [circle(colour)]).text for colour in COLOURS] == list(COLOURS)


@pytest.mark.parametrize("words", range(17))
def test_a_picture_may_begin_anywhere_in_a_block(client: LenspairClient, words: int) -> None:
    """The text before it grows by a token at a time; two pictures take turns at each place."""
    system = "Answer." + " a" * words
    rounds = []
    for _ in range(2):
        answers = [client.ask(QUESTION, [circle(colour)], system=system).text for colour in ("red", "blue")]
        plain = [client.ask(QUESTION, [circle(colour)]).text for colour in ("red", "blue")]
        assert plain == ["red", "blue"]
        assert answers[0] != answers[1]
        rounds.append(answers)
    assert rounds[0] == rounds[1]


def test_the_order_and_the_middle_of_several_pictures_count(client: LenspairClient) -> None:
    asked = Generation(return_token_ids=True, top_logprobs=0, max_output_tokens=4)

    def fingerprint(*colours: str) -> tuple[float, ...]:
        answer = client.ask(QUESTION, [circle(colour) for colour in colours], generation=asked)
        return tuple(round(place.chosen.logprob, 3) for place in answer.logprobs)

    orders = [
        ("red", "green", "blue"),
        ("red", "blue", "green"),
        ("red", "yellow", "blue"),
        ("green", "red", "blue"),
    ]
    first = [fingerprint(*colours) for colours in orders]
    assert len(set(first)) == len(orders)
    assert [fingerprint(*colours) for colours in orders] == first


def test_the_next_turn_reuses_the_former_one(client: LenspairClient) -> None:
    [feature] = client.ensure([circle("green", offset=3)])
    turns = [Turn("user", (feature, QUESTION))]
    answer = client.generate(turns)
    turns += [Turn("assistant", (answer.text,)), Turn("user", ("How many shapes are there?",))]
    following = client.generate(turns)
    assert following.usage.reused_tokens >= answer.usage.input_tokens // 16 * 16 - 16


def test_an_evicted_picture_is_not_answered_from_memory(client: LenspairClient) -> None:
    [feature] = client.ensure([circle("blue", offset=5)])
    turns = [Turn("user", (feature, QUESTION))]
    assert client.generate(turns).text == "blue"
    client.evict([feature])
    with pytest.raises(FeatureNotFound):
        client.generate(turns, timeout=5)


def test_tenants_share_nothing() -> None:
    """Neither pictures, whose keys hold the tenant, nor text, whose blocks are named from the tenant on."""
    image, reused = circle("yellow", offset=7), []
    text = "Tell me about the sea and the weather."
    with Pair(environment={"LENSPAIR_TENANT_METADATA": "lenspair-tenant"}) as pair:
        for tenant in ("one", "one", "other"):
            options = ClientOptions(metadata=(("lenspair-tenant", tenant),))
            with LenspairClient(pair.encoder.address, pair.decoder.address, options) as client:
                answers = client.ask(QUESTION, [image]), client.ask(text)
                assert answers[0].text == "yellow"
                reused.append([answer.usage.reused_tokens > 0 for answer in answers])
    assert reused == [[False, False], [True, True], [False, False]]


def test_samples_are_the_same_together_and_alone(client: LenspairClient) -> None:
    hot = Generation(temperature=2.0, seed=5, max_output_tokens=12)
    together = client.ask("Describe the picture.", [circle("red")], generation=replace(hot, samples=4))
    texts = [together.text, *(sample.text for sample in together.further_samples)]
    assert len(set(texts)) > 1
    for number, text in enumerate(texts):
        alone = replace(hot, first_sample=number)
        assert client.ask("Describe the picture.", [circle("red")], generation=alone).text == text


def test_answers_have_the_form_that_is_asked_for(client: LenspairClient) -> None:
    image = circle("green")
    choice = client.ask(QUESTION, [image], generation=Generation(choices=("red", "green", "blue")))
    assert (choice.text, choice.finish_reason) == ("green", "stop")
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = client.ask(QUESTION, [image], generation=Generation(json_schema=schema))
    assert json.loads(answer.text)["colour"] in ("red", "green", "blue")
    with pytest.raises(InvalidArgument):
        client.ask(QUESTION, [image], generation=Generation(regex="a("))
