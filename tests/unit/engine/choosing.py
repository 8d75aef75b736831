"""`sampling.choose` for rows that all have a token left."""

from collections.abc import Sequence

import torch

from decoder_service.engine import sampling
from decoder_service.engine.sampling import Choice, SamplingRow


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
    choices = []
    for outcome in sampling.choose(logits, rows):
        assert isinstance(outcome, Choice)
        choices.append(outcome)
    return choices
