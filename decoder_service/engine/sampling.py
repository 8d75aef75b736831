"""Logits to tokens, for each row by its own request's rules; knows no batch beyond its rows.

Each token of the vocabulary gets noise from a generator seeded with a hash of (seed, number of the token in
the answer), and the highest of probability over noise is chosen (the noise is exponential, so each token
wins with its probability). A request's text thus depends neither on its neighbours nor on where the answer
was interrupted; and the last bits of the logits, which do depend on the batch, matter only where two
tokens come out equal. (One number compared with the cumulative distribution would be cheaper, but each of
its boundaries moves with those bits: with 150,000 of them one token in 700 came out differently.)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decoder_service.engine.engine import Candidate, Sampling

_USUAL_NUCLEUS = 1024


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


def noise(seed: int, index: int, size: int, device: torch.device) -> torch.Tensor:
    """`[size]` exponential numbers (float64) that depend on the seed and the token's number alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
    return -torch.rand(size, dtype=torch.float64, generator=generator, device=device).log_()


def _without_forbidden(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    if not any(row.forbidden for row in rows):
        return logits
    allowed = logits.clone()
    for number, row in enumerate(rows):
        allowed[number, list(row.forbidden)] = -torch.inf
    return allowed


def _sample(logits: torch.Tensor, row: SamplingRow) -> int:
    token_ids, probabilities = _candidates(logits, row.sampling)
    spread = noise(row.seed, row.index, len(logits), logits.device)[token_ids]
    return int(token_ids[(probabilities / spread).argmax()])


def _candidates(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that top-k and then top-p leave, and their probabilities, which need not sum to 1."""
    # In float64: the smallest temperatures that a request can send are zero in float32.
    scores = (logits - logits.max()).double() / sampling.temperature
    token_ids = torch.arange(len(scores), device=scores.device)
    if 0 < sampling.top_k < len(scores):
        scores, token_ids = scores.topk(sampling.top_k)
    probabilities = scores.softmax(0)
    if sampling.top_p < 1:
        nucleus = _nucleus(probabilities, sampling.top_p)
        token_ids, probabilities = token_ids[nucleus], probabilities[nucleus]
    return token_ids, probabilities


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places of the fewest probabilities that sum to `top_p`; sorts all of them only when it must."""
    count = min(len(probabilities), _USUAL_NUCLEUS)
    best, places = probabilities.topk(count)
    if count < len(probabilities) and best.sum() < top_p:
        best, places = probabilities.sort(descending=True)
    before = best.cumsum(0) - best
    return places[: max(1, int((before < top_p).sum()))]


def _describe(logits: torch.Tensor, token_id: int, sampling: Sampling) -> Choice:
    if sampling.top_logprobs is None:
        return Choice(token_id)
    logprobs = logits.log_softmax(0)
    best = logprobs.topk(min(sampling.top_logprobs, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Choice(token_id, float(logprobs[token_id]), tuple(Candidate(*pair) for pair in pairs))
