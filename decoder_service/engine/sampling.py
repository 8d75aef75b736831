"""Logits to tokens, for each row by its own request's rules; knows no batch beyond its rows.

The rules apply in this order, which is that of Transformers' processors:

1. `logit_bias` is added;
2. repetition, presence and frequency penalties;
3. tokens that must not come are ruled out: those that the form of the answer does not allow, ends before
   `min_output_tokens`, and visual tokens. Where nothing would be left, ends may come early; where there is
   still nothing, the request ends;
4. temperature; 0 takes the best token;
5. `top_k`, `top_p` and `min_p`, each on what the one before left.

Of what is left, the token with the highest probability over its noise (see noise.py) is chosen: the noise is
exponential, so each token wins with its probability. A request's text thus depends neither on its
neighbours nor on where the answer was interrupted; and the last bits of the logits, which do depend on the
batch, matter only where two tokens come out equal. (One number compared with the cumulative distribution
would be cheaper, but each of its boundaries moves with those bits: with 150,000 of them one token in 700
came out differently.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoder_service.engine.engine import Candidate, Sampling
from decoder_service.engine.noise import noise
from decoder_service.engine.token_counts import TokenCounts
from shared.errors import InvalidRequest, LenspairError

# Sizes of a nucleus that are tried before the whole vocabulary is sorted.
_NUCLEI = (1024, 8192, 65536)
_LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How the token of one row is chosen: it is number `index` of its answer.

    It is none of `never`, and none of `ends` where anything else is left. `allowed`, if any, is a bit mask
    (see engine.TokenGrammar), `counts` what the penalties count, and None without penalties.
    """

    sampling: Sampling
    seed: int
    index: int
    never: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    allowed: NDArray[np.int32] | None = None
    counts: TokenCounts | None = None

    @property
    def takes_the_best(self) -> bool:
        return self.sampling.temperature == 0 or self.sampling.top_p == 0 or self.sampling.top_k == 1

    @property
    def is_plain(self) -> bool:
        """True when the best of the model's own logits is the token, unless it is one of `never`."""
        is_untouched = self.counts is None and self.allowed is None and not self.ends
        return is_untouched and self.takes_the_best and not self.sampling.logit_bias


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, with what the request wants to know about it."""

    token_id: int
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()


Outcome = Choice | LenspairError
"""What a step gives a request: a token, or why it ends."""


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Outcome]:
    """One token for each row of `logits` `[R, vocab_size]` (float32, left as they are)."""
    best = logits.argmax(dim=-1).tolist()
    return [
        _outcome(own, token_id if row.is_plain and token_id not in row.never else _choose(own, row), row)
        for row, own, token_id in zip(rows, logits, best, strict=True)
    ]


def _outcome(logits: torch.Tensor, token_id: int | None, row: SamplingRow) -> Outcome:
    if token_id is None:
        return InvalidRequest("no token is left that the rules of the request allow", field="task")
    return _describe(logits, token_id, row.sampling)


def _choose(logits: torch.Tensor, row: SamplingRow) -> int | None:
    """None where every token is ruled out."""
    scores = logits.clone()
    _shift(scores, row.sampling.logit_bias)
    if row.counts is not None:
        _penalize(scores, row.counts, row.sampling)
    _rule_out(scores, row)
    if scores.max() == -torch.inf:
        return None
    return int(scores.argmax()) if row.takes_the_best else _sample(scores, row)


def _shift(scores: torch.Tensor, logit_bias: Sequence[tuple[int, float]]) -> None:
    if logit_bias:
        token_ids, biases = zip(*logit_bias, strict=True)
        places = torch.tensor(token_ids, device=scores.device)
        scores.index_add_(0, places, torch.tensor(biases, dtype=scores.dtype, device=scores.device))


def _penalize(scores: torch.Tensor, counts: TokenCounts, sampling: Sampling) -> None:
    token_ids, times = counts.ids.to(scores.device), counts.counts.to(scores.device)
    penalized = scores[token_ids]
    factor = sampling.repetition_penalty
    if factor != 1:
        penalized = torch.where(penalized > 0, penalized / factor, penalized * factor)
    penalized -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
    scores[token_ids] = penalized.clamp_(-_LARGEST, _LARGEST)  # infinite ones could not be compared


def _rule_out(scores: torch.Tensor, row: SamplingRow) -> None:
    if row.allowed is not None:
        scores.masked_fill_(~_bits(row.allowed, len(scores)).to(scores.device), -torch.inf)
    scores[list(row.never)] = -torch.inf
    if row.ends:
        ends = list(row.ends)
        before = scores[ends]
        scores[ends] = -torch.inf
        if scores.max() == -torch.inf:
            scores[ends] = before


def _bits(mask: NDArray[np.int32], size: int) -> torch.Tensor:
    """`[size]`, True where the bit of a token is set."""
    return torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little", count=size)).bool()


def _sample(scores: torch.Tensor, row: SamplingRow) -> int:
    token_ids, probabilities = _candidates(scores, row.sampling)
    spread = noise(row.seed, row.sampling.sample_index, row.index, token_ids)
    return int(token_ids[(probabilities / spread).argmax()])


def _candidates(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that top-k, top-p and min-p leave, and their probabilities, which need not sum to 1."""
    token_ids = torch.arange(len(scores), device=scores.device)
    if 0 < sampling.top_k < len(scores):
        scores, token_ids = scores.topk(sampling.top_k)
    # In float64: the smallest temperatures that a request can send are zero in float32.
    probabilities = ((scores - scores.max()).double() / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        kept = _nucleus(probabilities, sampling.top_p)
        token_ids, probabilities = token_ids[kept], probabilities[kept]
    if sampling.min_p > 0:
        is_dropped = probabilities < sampling.min_p * probabilities.max()
        token_ids, probabilities = token_ids[~is_dropped], probabilities[~is_dropped]
    return token_ids, probabilities


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places of the fewest probabilities that sum to `top_p`; sorts all of them only when it must."""
    for count in (each for each in _NUCLEI if each < len(probabilities)):
        best, places = probabilities.topk(count)
        if best.sum() >= top_p:
            break
    else:
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
