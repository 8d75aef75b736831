"""By which rules one request's tokens are chosen, and what they remember of its answer; knows no batch."""

import secrets

from decoder_service.engine.engine import GenerationRequest
from decoder_service.engine.sampling import SamplingRow


class TokenRules:
    """The rules of one open request, for a model of `vocab_size` tokens."""

    def __init__(self, request: GenerationRequest, vocab_size: int) -> None:
        sampling, limits = request.sampling, request.limits
        self._sampling = sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._ends = frozenset(each for each in limits.stop_token_ids if 0 <= each < vocab_size)
        self._min_output_tokens = limits.min_output_tokens

    def row(self, output_index: int) -> SamplingRow:
        """How token number `output_index` of the answer is chosen."""
        forbidden = self._ends if output_index < self._min_output_tokens else frozenset()
        return SamplingRow(self._sampling, self._seed, output_index, forbidden)

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that was chosen."""
