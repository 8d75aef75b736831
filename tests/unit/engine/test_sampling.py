"""Tokens from logits: filters, noise, and what is said about them."""

import math

import pytest
import torch

from decoder_service.engine.engine import Sampling
from decoder_service.engine.noise import noise
from decoder_service.engine.sampling import Choice, SamplingRow
from tests.unit.engine.choosing import choose

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0, -1.0]])
DRAWS = 400


def draw(sampling: Sampling, *, logits: torch.Tensor = LOGITS, draws: int = DRAWS) -> list[int]:
    """The tokens at many places of one answer with seed 1."""
    rows = [SamplingRow(sampling, seed=1, index=index) for index in range(draws)]
    return [choice.token_id for choice in choose(logits.expand(draws, -1), rows)]


def test_greedy_takes_the_best() -> None:
    assert set(draw(Sampling())) == {1}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, top_p=0),
        Sampling(temperature=5, top_p=0),
        Sampling(temperature=5, top_k=1),
        Sampling(temperature=1e-30),
        Sampling(temperature=1e-300),
        Sampling(temperature=5e-324),
        Sampling(temperature=5, top_p=1e-9),
    ],
)
def test_what_leaves_one_token_is_greedy(sampling: Sampling) -> None:
    """G14."""
    assert set(draw(sampling)) == {1}


def test_top_k_keeps_the_best_k() -> None:
    assert set(draw(Sampling(temperature=5, top_k=3))) == {1, 2, 3}
    assert set(draw(Sampling(temperature=5, top_k=99))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_the_mass() -> None:
    best_two = LOGITS.softmax(-1)[0, [1, 2]].sum().item()
    assert set(draw(Sampling(temperature=1, top_p=best_two - 0.01))) == {1, 2}
    assert set(draw(Sampling(temperature=1, top_p=best_two + 0.01))) == {1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    share = (LOGITS[0, 1].exp() / LOGITS[0, 1:4].exp().sum()).item()
    assert set(draw(Sampling(temperature=1, top_k=3, top_p=share - 0.01))) == {1}
    assert set(draw(Sampling(temperature=1, top_k=3, top_p=share + 0.01))) == {1, 2}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    tokens = draw(Sampling(temperature=temperature), draws=4000)
    expected = (LOGITS[0] / temperature).softmax(0)
    for token_id, probability in enumerate(expected.tolist()):
        spread = 4 * math.sqrt(probability * (1 - probability) / 4000)
        assert abs(tokens.count(token_id) / 4000 - probability) < spread


def test_a_seed_repeats_whatever_the_neighbours_do() -> None:
    """G12: A has a seed, B has another one each time."""
    sampling = Sampling(temperature=0.8)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    alone = [choose(logits[:1], [SamplingRow(sampling, 42, index)])[0] for index in range(20)]
    for other_seed in range(5):
        rows = [[SamplingRow(sampling, 42, n), SamplingRow(sampling, other_seed, n)] for n in range(20)]
        assert [choose(logits, pair)[0] for pair in rows] == alone


def test_each_row_keeps_its_own_rules() -> None:
    """G09: shuffled ten times."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(), Sampling(temperature=1.2), Sampling(temperature=0.7, top_k=5, top_p=0.9)]
    rows = [SamplingRow(sampling, seed, 3) for seed, sampling in enumerate(samplings)]
    alone = [choose(logits[n : n + 1], [row])[0].token_id for n, row in enumerate(rows)]
    for round_number in range(10):
        order = torch.randperm(3, generator=torch.Generator().manual_seed(round_number)).tolist()
        together = choose(logits[order], [rows[n] for n in order])
        assert [choice.token_id for choice in together] == [alone[n] for n in order]


def test_noise_depends_on_seed_and_place() -> None:
    tokens = torch.arange(5)
    first = {
        noise(seed, sample, n, tokens)[0].item()
        for seed in (-1, 0, 1, 2**63 - 1)
        for sample in range(3)
        for n in range(100)
    }
    assert len(first) == 1200
    assert min(first) > 0
    assert torch.equal(noise(5, 0, 7, tokens), noise(5, 0, 7, tokens))


def test_noise_is_the_token_s_own_whichever_others_are_asked_for() -> None:
    everything = noise(5, 1, 7, torch.arange(1000))
    some = torch.tensor([3, 999, 500])
    assert torch.equal(noise(5, 1, 7, some), everything[some])


def test_noise_is_exponential_and_independent_from_place_to_place() -> None:
    """Deciles of 100,000 numbers, and the correlation of two places of an answer and of two tokens."""
    tokens = torch.arange(100_000)
    numbers, others = noise(1, 0, 0, tokens), noise(1, 0, 1, tokens)
    bounds = -torch.log1p(-torch.arange(1, 10, dtype=torch.float64) / 10)
    shares = torch.bincount(torch.bucketize(numbers, bounds), minlength=10) / 100_000
    assert (shares - 0.1).abs().max() < 0.005
    pairs = torch.stack([numbers[:-1], numbers[1:], others[:-1]])
    assert torch.corrcoef(pairs).triu(1).abs().max() < 0.02


def test_the_last_bits_of_the_logits_hardly_ever_matter() -> None:
    """A large vocabulary, and noise of the size that another batch makes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50_000, generator=generator)
    nudged = logits + 2e-6 * torch.randn(1, 50_000, generator=generator)
    rows = [SamplingRow(Sampling(temperature=1.0), 1, index) for index in range(300)]
    assert all(choose(logits, [row]) == choose(nudged, [row]) for row in rows)


def test_a_wide_nucleus_is_exact_too() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.1
    rows = [SamplingRow(Sampling(temperature=1.0, top_p=0.5), 1, index) for index in range(200)]
    ranked = logits.softmax(0).sort(descending=True)
    kept = set(ranked.indices[: int((ranked.values.cumsum(0) < 0.5).sum()) + 1].tolist())
    assert 1024 < len(kept) < 5000
    assert {choice.token_id for choice in choose(logits.expand(200, -1), rows)} <= kept


def test_forbidden_tokens_are_never_chosen() -> None:
    forbidden = frozenset({1, 2})
    rows = [SamplingRow(Sampling(temperature=t), 1, n, ends=forbidden) for n, t in enumerate([0, 1.0] * 100)]
    chosen = {choice.token_id for choice in choose(LOGITS.expand(200, -1), rows)}
    assert chosen == {0, 3, 4}


def test_forbidding_one_row_leaves_the_logits_and_the_others_alone() -> None:
    logits = LOGITS.expand(2, -1).clone()
    rows = [SamplingRow(Sampling(), 1, 0, ends=frozenset({1})), SamplingRow(Sampling(), 1, 0)]
    assert [choice.token_id for choice in choose(logits, rows)] == [2, 1]
    assert torch.equal(logits, LOGITS.expand(2, -1))


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    sampling = Sampling(temperature=3.0, top_k=1, top_logprobs=2)
    [choice] = choose(LOGITS, [SamplingRow(sampling, 1, 0, ends=frozenset({1}))])
    expected = LOGITS[0].log_softmax(0)
    assert choice.token_id == 2
    assert choice.logprob == pytest.approx(expected[2].item())
    assert [candidate.token_id for candidate in choice.top] == [1, 2]
    assert choice.top[0].logprob == pytest.approx(expected[1].item())


@pytest.mark.parametrize(("asked", "logprob"), [(None, False), (0, True)])
def test_log_probabilities_come_only_when_asked_for(asked: int | None, logprob: bool) -> None:
    [choice] = choose(LOGITS, [SamplingRow(Sampling(top_logprobs=asked), 1, 0)])
    assert (choice.logprob is not None) == logprob
    assert choice.top == ()
    assert isinstance(choice, Choice)


def test_more_candidates_than_tokens_are_all_tokens() -> None:
    [choice] = choose(LOGITS, [SamplingRow(Sampling(top_logprobs=20), 1, 0)])
    assert [candidate.token_id for candidate in choice.top] == [1, 2, 3, 0, 4]
