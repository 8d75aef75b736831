"""By which rules one request's tokens are chosen, and what they remember of its answer; knows no batch."""

import secrets
from collections.abc import Iterator

from decoder_service.engine.engine import GenerationRequest, Prompt
from decoder_service.engine.sampling import SamplingRow
from decoder_service.engine.token_counts import TokenCounts


class TokenRules:
    """The rules of one open request, for a model of `vocab_size` tokens; tokens of `never` never come.

    They outlive an interruption: what the answer had is remembered, and not counted again.
    """

    def __init__(self, request: GenerationRequest, vocab_size: int, never: frozenset[int]) -> None:
        sampling, limits = request.sampling, request.limits
        self._sampling = sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._never = never
        self._ends = frozenset(each for each in limits.stop_token_ids if 0 <= each < vocab_size)
        self._min_output_tokens = limits.min_output_tokens
        self._grammar = request.grammar
        self._counts = _counts_of(request)

    def row(self, output_index: int) -> SamplingRow:
        """How token number `output_index` of the answer is chosen."""
        return SamplingRow(
            self._sampling,
            self._seed,
            output_index,
            never=self._never,
            ends=self._ends if output_index < self._min_output_tokens else frozenset(),
            allowed=None if self._grammar is None else self._grammar.mask(),
            counts=self._counts,
        )

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that was chosen."""
        if self._counts is not None:
            self._counts.add(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)


def _counts_of(request: GenerationRequest) -> TokenCounts | None:
    """What the penalties count at the start; None when there are none."""
    sampling = request.sampling
    has_penalty = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if sampling.repetition_penalty == 1 and not has_penalty:
        return None
    counts = TokenCounts(_text_tokens(request.prompt) if sampling.repetition_penalty != 1 else ())
    for token_id in request.continuation:
        counts.add(token_id)
    return counts


def _text_tokens(prompt: Prompt) -> Iterator[int]:
    """The tokens of a prompt that are no rows of a feature."""
    place = 0
    for start, count in sorted(span for spans in prompt.visual_spans for span in spans):
        yield from prompt.token_ids[place:start]
        place = start + count
    yield from prompt.token_ids[place:]
