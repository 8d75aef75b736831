"""What the blocks of a sequence hold, as names that are equal only for equal contents. Pure.

The keys and values of a token depend on everything before it. So the name of a block is a hash over the
name of the block before it and over its own tokens, and at visual positions, where all token ids are the
same, over which row of which feature stands there. The chain starts from a root (the tenant), so nothing
is ever shared across roots. Positions need no place in the name: they follow from the tokens and the
features' grids, and a feature's id stands for its grid as well.

A wrong hit would be an answer about another picture, so names are SHA-256 and nothing is compared by less.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from decoder_service.engine.kv_cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class VisualStretch:
    """The tokens `[start, end)` are the rows of the feature `feature_id` from `first_row` on."""

    start: int
    end: int
    feature_id: bytes
    first_row: int


def visual_stretches(
    visual_spans: Sequence[Sequence[tuple[int, int]]], feature_ids: Sequence[bytes]
) -> Iterator[VisualStretch]:
    """The stretches of a prompt, in its order; `visual_spans` are those of engine.Prompt."""
    for spans, feature_id in zip(visual_spans, feature_ids, strict=True):
        row = 0
        for start, count in spans:
            yield VisualStretch(start, start + count, feature_id, row)
            row += count


class PrefixChain:
    """The names of one sequence's full blocks, made as they are asked for.

    `token_ids` is the sequence's own list, which only grows.
    """

    def __init__(self, token_ids: Sequence[int], stretches: Sequence[VisualStretch] = (), root: bytes = b""):
        self._token_ids = token_ids
        self._stretches = stretches
        self._next_stretch = 0
        self._root = sha256(root).digest()
        self._names: list[bytes] = []

    def names(self, num_blocks: int) -> Sequence[bytes]:
        """The names of the first `num_blocks` blocks (or more), all of whose tokens must be known."""
        assert num_blocks * BLOCK_TOKENS <= len(self._token_ids)
        while len(self._names) < num_blocks:
            self._names.append(self._next_name())
        return self._names

    def _next_name(self) -> bytes:
        start = len(self._names) * BLOCK_TOKENS
        end = start + BLOCK_TOKENS
        name = sha256(self._names[-1] if self._names else self._root)
        name.update(array("q", self._token_ids[start:end]))
        for stretch in self._stretches_until(end):
            first, last = max(start, stretch.start), min(end, stretch.end)
            row = stretch.first_row + first - stretch.start
            name.update(array("q", (first - start, last - start, row, len(stretch.feature_id))))
            name.update(stretch.feature_id)
        return name.digest()

    def _stretches_until(self, end: int) -> Iterator[VisualStretch]:
        """Those that reach into the block that ends at `end`; blocks are asked for in their order."""
        while self._next_stretch < len(self._stretches):
            stretch = self._stretches[self._next_stretch]
            if stretch.start >= end:
                return
            yield stretch
            if stretch.end > end:
                return
            self._next_stretch += 1
