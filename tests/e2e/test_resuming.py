"""A streamed answer that is cut again and again, at any message, is the answer that was never cut."""

import random
from typing import Any, TypeVar

import grpc
import pytest

from bench.fault_questions import Known, questions
from demo.pair import Pair
from lenspair_client import Answer, ClientOptions, LenspairClientError, Unavailable
from lenspair_client.blocking_calls import BlockingCalls
from lenspair_client.effects import Flow, Read
from lenspair_client.requests import Requests

T = TypeVar("T")
OPTIONS = ClientOptions()
GONE = Unavailable("this test cuts streams", code=grpc.StatusCode.UNAVAILABLE)


def cut_at_random(flow: Flow[T], rng: random.Random) -> Flow[T]:
    """The same flow, to which every tenth message or so is lost with its connection."""
    result: Any = None
    error: LenspairClientError | None = None
    while True:
        try:
            effect = flow.throw(error) if error else flow.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        result, error = None, None
        if isinstance(effect, Read) and rng.random() < 0.1:
            error = GONE
            continue
        try:
            result = yield effect
        except LenspairClientError as failure:
            error = failure


def flow_of(known: Known) -> Flow[Answer]:
    return Requests(OPTIONS).ask(
        known.text,
        known.images,
        system="",
        generation=known.generation,
        settings=None,
        timeout=None,
        is_stream=True,
    )


def ask(pair: Pair, flow: Flow[Answer]) -> tuple[str, Answer]:
    calls = BlockingCalls(pair.encoder_target, pair.decoder_target, OPTIONS)
    steps = calls.steps(flow)
    pieces = []
    try:
        while True:
            pieces.append(next(steps))
    except StopIteration as end:
        return "".join(pieces), end.value
    finally:
        calls.close()


@pytest.mark.parametrize("known", questions(6, seed=3), ids=range(6))
def test_a_cut_answer_is_the_whole_answer(pair: Pair, known: Known) -> None:
    whole, answer = ask(pair, flow_of(known))
    assert whole == answer.text
    for seed in range(4):
        joined, cut = ask(pair, cut_at_random(flow_of(known), random.Random(seed)))
        assert joined == cut.text == whole
        assert cut.token_ids == answer.token_ids
        assert cut.usage.output_tokens == answer.usage.output_tokens
        assert cut.resumed <= cut.repeated
    if len(answer.token_ids) > 30:
        assert cut.resumed > 0
