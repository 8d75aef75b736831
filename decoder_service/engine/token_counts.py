"""How often each token stands in an answer, as tensors that grow by one; knows no logits."""

from collections.abc import Iterable

import torch

_FIRST_ROOM = 256


class TokenCounts:
    """Tokens of an answer with their counts, and tokens of its prompt, which count 0 until they are answered.

    Taking a token costs the same however long the answer is.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        first = list(dict.fromkeys(prompt))
        self._place_of = {token_id: place for place, token_id in enumerate(first)}
        self._ids = torch.tensor([*first, *[0] * _FIRST_ROOM])
        self._counts = torch.zeros(len(self._ids))

    @property
    def ids(self) -> torch.Tensor:
        """`[n]`, all different."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> torch.Tensor:
        """`[n]` in float32, in the order of `ids`."""
        return self._counts[: len(self._place_of)]

    def add(self, token_id: int) -> None:
        """Counts a token of the answer."""
        place = self._place(token_id)  # may replace the tensors
        self._counts[place] += 1

    def _place(self, token_id: int) -> int:
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self._place_of)
            if place == len(self._ids):
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)])
                self._counts = torch.cat([self._counts, torch.empty_like(self._counts)])
            self._ids[place], self._counts[place] = token_id, 0
        return place
