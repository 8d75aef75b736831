"""What one request's rules remember: counts, penalties, tokens that never come."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoder_service.engine import sampling as product
from decoder_service.engine.engine import GenerationRequest, Limits, NoTensors, Prompt, Sampling
from decoder_service.engine.sampling import Choice, SamplingRow
from decoder_service.engine.token_counts import TokenCounts
from decoder_service.engine.token_rules import TokenRules
from shared.errors import InvalidRequest
from tests.unit.engine.choosing import choose

VOCABULARY = 50
PAD = 40


def rules(
    sampling: Sampling,
    prompt: tuple[int, ...] = (1, 2),
    *,
    spans: tuple[tuple[tuple[int, int], ...], ...] = (),
    limits: Limits | None = None,
    **rest: Any,
) -> TokenRules:
    positions = tuple((n, n, n) for n in range(len(prompt)))
    request = GenerationRequest(
        "a",
        Prompt(prompt, positions, len(prompt), spans),
        NoTensors(),
        sampling,
        limits or Limits(100),
        **rest,
    )
    return TokenRules(request, VOCABULARY, frozenset({PAD}))


def chosen(logits: torch.Tensor, row: SamplingRow) -> int:
    return choose(logits[None], [row])[0].token_id


def answer(subject: TokenRules, steps: torch.Tensor) -> list[int]:
    """The tokens of an answer whose logits are the rows of `steps`."""
    tokens = []
    for index, logits in enumerate(steps):
        tokens.append(chosen(logits, subject.row(index)))
        subject.accept(tokens[-1])
    return tokens


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, PAD] = -50.0
    return logits


def test_counts_grow_without_end() -> None:
    counts, rng = TokenCounts(range(10)), random.Random(0)
    taken = [rng.randrange(2000) for _ in range(5000)]
    for token_id in taken:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token_id: taken.count(token_id) for token_id in {*taken, *range(10)}}


@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    steps, prompt = some_logits(40), (3, 4, 5, 3)
    ours = answer(rules(Sampling(repetition_penalty=penalty), prompt), steps)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    theirs: list[int] = []
    for logits in steps:
        seen = torch.tensor([[*prompt, *theirs]])
        theirs.append(int(processor(seen, logits[None].clone()).argmax()))
    assert ours == theirs
    assert ours != answer(rules(Sampling(), prompt), steps)


def test_visual_positions_never_count() -> None:
    """G23: 2,500 tokens of a picture, and the same id once as text."""
    logits = torch.zeros(VOCABULARY)
    logits[7], logits[8] = 2.0, 1.9
    prompt = (1, *[7] * 2500, 2)
    row = rules(Sampling(repetition_penalty=1.3), prompt, spans=(((1, 2500),),)).row(0)
    assert chosen(logits, row) == 7
    assert chosen(logits, rules(Sampling(repetition_penalty=1.3), prompt).row(0)) == 8


def test_presence_and_frequency_count_the_answer_alone() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[7], logits[8], logits[9] = 3.0, 2.0, 0.5
    presence = rules(Sampling(presence_penalty=1.5), (7, 7))
    assert answer(presence, logits.expand(4, -1)) == [7, 8, 7, 7]
    frequency = rules(Sampling(frequency_penalty=1.2), (7, 7))
    assert answer(frequency, logits.expand(5, -1)) == [7, 8, 7, 8, 7]


def test_negative_penalties_invite_repetition() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[7], logits[8] = 1.0, 1.1
    subject = rules(Sampling(presence_penalty=-2.0), continuation=(7,))
    assert answer(subject, logits.expand(3, -1)) == [7, 7, 7]


def test_a_resumed_answer_is_penalized_as_if_never_cut() -> None:
    steps = some_logits(30, seed=3)
    sampling = Sampling(temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.4)
    whole = answer(rules(sampling), steps)
    resumed = rules(sampling, continuation=tuple(whole[:11]))
    rest = []
    for index in range(11, 30):
        rest.append(chosen(steps[index], resumed.row(index)))
        resumed.accept(rest[-1])
    assert rest == whole[11:]


def test_a_bias_moves_single_tokens() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[7] = 5.0
    assert chosen(logits, rules(Sampling(logit_bias=((8, 5.5),))).row(0)) == 8
    assert chosen(logits, rules(Sampling(logit_bias=((7, -100.0), (9, 1.0)))).row(0)) == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_visual_tokens_never_come_even_when_nothing_else_is_likely(temperature: float) -> None:
    logits = torch.full((VOCABULARY,), -20.0)
    logits[PAD], logits[6] = 30.0, 10.0
    sampling = Sampling(temperature=temperature, seed=1, logit_bias=((PAD, 100.0),))
    assert answer(rules(sampling), logits.expand(20, -1)) == [6] * 20
    assert chosen(logits, rules(Sampling(temperature=temperature, seed=1)).row(0)) == 6


def test_ends_come_no_earlier_than_allowed_unless_nothing_else_is_left() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[3] = 9.0
    limits = Limits(10, min_output_tokens=2, stop_token_ids=frozenset({3, 10**9}))
    subject = rules(Sampling(), limits=limits)
    assert [token_id == 3 for token_id in answer(subject, logits.expand(3, -1))] == [False, False, True]

    class OnlyTheEnd:
        def mask(self) -> np.ndarray[Any, np.dtype[np.int32]]:
            mask = np.zeros(2, dtype=np.int32)
            mask[0] = 1 << 3
            return mask

        def accept(self, token_id: int) -> None:
            assert token_id == 3

    assert answer(rules(Sampling(), limits=limits, grammar=OnlyTheEnd()), logits[None]) == [3]


def test_a_mask_leaves_only_what_it_allows() -> None:
    allowed = {0, 31, 32, 49}
    mask = np.zeros(2, dtype=np.int32)
    for token_id in allowed:
        mask[token_id // 32] |= np.int32(np.uint32(1 << (token_id % 32)).view(np.int32))
    rows = [SamplingRow(Sampling(temperature=2.0), 1, index, allowed=mask) for index in range(300)]
    found = {choice.token_id for choice in choose(torch.zeros(300, VOCABULARY), rows)}
    assert found == allowed


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_to_sample_is_what_transformers_leaves(seed: int) -> None:
    """Temperature, top-k, top-p and min-p, in Transformers' order."""
    rng = random.Random(seed)
    sampling = Sampling(
        temperature=rng.uniform(0.3, 2),
        top_k=rng.choice([0, 3, 20]),
        top_p=rng.choice([1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.02, 0.3]),
    )
    logits = some_logits(1, seed)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    left = warpers(torch.empty(1, 0, dtype=torch.long), logits.clone())[0]
    rows = [SamplingRow(sampling, 1, index) for index in range(3000)]
    found = {choice.token_id for choice in choose(logits.expand(3000, -1), rows)}
    kept = set(torch.isfinite(left).nonzero().flatten().tolist())
    likely = set((left.softmax(0) > 0.005).nonzero().flatten().tolist())
    assert likely <= found <= kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 0.01, 1e300])
def test_no_penalty_makes_numbers_that_can_not_be_compared(penalty: float, temperature: float) -> None:
    """An engine must outlive what its callers' checks let through."""
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, min_p=0.1, top_p=0.9, seed=1)
    steps = some_logits(30)
    prompt = tuple(steps[0].argsort(descending=True)[:10].tolist())
    tokens = answer(rules(sampling, prompt), steps)
    assert len(tokens) == 30
    assert penalty > 1 or tokens[0] in prompt


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, min_p=0.1)]
)
@pytest.mark.parametrize("left", [frozenset(), frozenset({PAD})])
def test_where_nothing_is_left_the_request_ends_and_its_neighbour_goes_on(
    sampling: Sampling, left: frozenset[int]
) -> None:
    mask = np.zeros(2, dtype=np.int32)
    for token_id in left:
        mask[token_id // 32] |= np.int32(1 << (token_id % 32))
    rows = [SamplingRow(sampling, 1, 0, never=frozenset({PAD}), allowed=mask), SamplingRow(Sampling(), 1, 0)]
    ended, going_on = product.choose(some_logits(2), rows)
    assert isinstance(ended, InvalidRequest)
    assert isinstance(going_on, Choice)


def test_logits_that_are_no_numbers_end_nothing() -> None:
    logits = torch.full((2, VOCABULARY), torch.nan)
    rows = [SamplingRow(Sampling(temperature=1.0, min_p=0.5, top_p=0.5), 1, 0), SamplingRow(Sampling(), 1, 0)]
    assert len(product.choose(logits, rows)) == 2
