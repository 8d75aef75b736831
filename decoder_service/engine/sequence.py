"""The state of one request in the engine: what is known, what is computed, what it has, when it ends."""

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from decoder_service.engine.kv_cache import BLOCK_TOKENS, blocks_for
from decoder_service.engine.prefix import PrefixChain, visual_stretches

Finish = Literal["stop", "length"]


class Priority(IntEnum):
    """Who enters the batch first; smaller is sooner."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer of one request.

    `token_ids` are the prompt's and the answer's tokens so far. The first `num_computed` of them have keys
    and values in the blocks of `block_table`; the model has yet to see the others. An answer that was begun
    elsewhere (`continuation`) is simply known from the start.

    `feature_ends` says behind which token each feature of the prompt is computed. `features_from` is the
    number of the first feature whose tensor is at hand (None: none is), and `is_loading` is true while
    tensors are being fetched. `number` orders requests by their arrival; `last_step` is the last step that
    worked on it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_output_tokens: int
    stop_token_ids: frozenset[int]
    priority: Priority
    arrived: float
    chain: PrefixChain
    feature_ends: tuple[int, ...]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    features_from: int | None = None
    is_loading: bool = False
    number: int = 0
    last_step: int = 0

    @classmethod
    def begin(
        cls,
        request_id: str,
        prompt: Iterable[int],
        *,
        max_output_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        continuation: Iterable[int] = (),
        priority: Priority = Priority.NORMAL,
        arrived: float = 0.0,
        visual_spans: List[List[tuple[int, int]]] = (),
        feature_ids: List[bytes] = (),
        prefix_root: bytes = b"",
    ) -> "Sequence":
        """A new sequence; arguments are those of engine.GenerationRequest and what it holds."""
        token_ids = list(prompt)
        num_prompt_tokens = len(token_ids)
        token_ids.extend(continuation)
        return cls(
            request_id,
            token_ids,
            num_prompt_tokens,
            max_output_tokens,
            stop_token_ids,
            priority,
            arrived,
            PrefixChain(token_ids, tuple(visual_stretches(visual_spans, feature_ids)), prefix_root),
            tuple(sum(spans[-1]) for spans in visual_spans),
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Known tokens that the model has not seen: many before prefill, one while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """True when one token, the newest of the answer, is all that is pending."""
        return self.num_pending == 1 and self.num_computed > 0

    @property
    def max_tokens(self) -> int:
        """The length that the sequence never exceeds."""
        return self.num_prompt_tokens + self.max_output_tokens

    @property
    def missing_blocks(self) -> int:
        """Blocks that the known tokens need beyond those of the block table."""
        return blocks_for(len(self.token_ids)) - len(self.block_table)

    @property
    def finish(self) -> Finish | None:
        """Why the answer is complete as it stands, or None."""
        if self.num_output_tokens and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_output_tokens else None

    def reusable_names(self) -> List[bytes]:
        """The names of the blocks that may be taken from the cache.

        The last known token is never among them: the model must see it to say what comes next.
        """
        count = (len(self.token_ids) - 1) // BLOCK_TOKENS
        return self.chain.names(count)[:count]

    def first_missing_feature(self, num_computed: int) -> int | None:
        """The first feature that prefill from `num_computed` on needs and that is not at hand."""
        first = bisect_right(self.feature_ends, num_computed)
        is_at_hand = self.features_from is not None and self.features_from <= first
        return None if first == len(self.feature_ends) or is_at_hand else first

    def append(self, token_id: int) -> Finish | None:
        """Takes the next token of the answer; returns why the answer ends with it, or None."""
        self.token_ids.append(token_id)
        return self.finish

    def start_over(self) -> None:
        """Forgets what was computed. A list of blocks that a step may still name is left as it is."""
        self.num_computed = 0
        self.block_table = []
