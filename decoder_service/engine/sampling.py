"""Logits to tokens, for each row by its own request's rules; knows no batch beyond its rows.

The noise of a row is one number in [0, 1), a hash of (seed, number of the token in the answer), and the
token is where that number falls on the cumulative distribution over what the filters left, in the order of
token ids. So a request's text depends neither on its neighbours nor on where the answer was interrupted,
and float noise in the logits can move a boundary a little but never reorder the candidates.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoder_service.engine.engine import Candidate, Sampling


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the token of one row is chosen: it is number `index` of its answer, and none of `forbidden`."""

    sampling: Sampling
    seed: int
    index: int
    forbidden: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, with what the request wants to know about it."""

    token_id: int
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
    """One token for each row of `logits` `[R, vocab_size]` (float32, left as they are)."""
    allowed = _without_forbidden(logits, rows)
    token_ids = allowed.argmax(dim=-1).tolist()
    for number, row in enumerate(rows):
        if row.sampling.temperature > 0 and row.sampling.top_p > 0:
            token_ids[number] = _sample(allowed[number], row)
    return [_describe(logits[number], token_ids[number], row.sampling) for number, row in enumerate(rows)]


def noise(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's number alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)


def _without_forbidden(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    if not any(row.forbidden for row in rows):
        return logits
    allowed = logits.clone()
    for number, row in enumerate(rows):
        allowed[number, list(row.forbidden)] = -torch.inf
    return allowed


def _sample(logits: torch.Tensor, row: SamplingRow) -> int:
    token_ids, probabilities = _candidates(logits, row.sampling)
    cumulative = probabilities.double().cumsum(0)
    place = torch.searchsorted(cumulative, noise(row.seed, row.index) * cumulative[-1], right=True)
    return int(token_ids[min(int(place), len(token_ids) - 1)])


def _candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k and then top-p leave, in the order of ids, with probabilities that need not sum to 1."""
    scores = (logits - logits.max()) / sampling.temperature
    vocabulary = scores.shape[0]
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    if top_k == vocabulary and sampling.top_p >= 1:
        return torch.arange(vocabulary, device=scores.device), scores.softmax(0)
    best, token_ids = scores.topk(top_k)
    probabilities = best.softmax(0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        count = max(1, int((before < sampling.top_p).sum()))
        token_ids, probabilities = token_ids[:count], probabilities[:count]
    token_ids, order = token_ids.sort()
    return token_ids, probabilities[order]


def _describe(logits: torch.Tensor, token_id: int, sampling: Sampling) -> Choice:
    if sampling.top_logprobs is None:
        return Choice(token_id)
    logprobs = logits.log_softmax(0)
    best = logprobs.topk(min(sampling.top_logprobs, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Choice(token_id, float(logprobs[token_id]), tuple(Candidate(*pair) for pair in pairs))
