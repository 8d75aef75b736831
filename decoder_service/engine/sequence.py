"""The state of one request in the engine: what is known, what is computed, when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

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
    and values in the cache; the model has yet to see the others. An answer that was begun elsewhere
    (`continuation`) is simply known from the start.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_output_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        request_id: str,
        prompt: Iterable[int],
        *,
        max_output_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        continuation: Iterable[int] = (),
    ) -> "Sequence":
        token_ids = list(prompt)
        num_prompt_tokens = len(token_ids)
        token_ids.extend(continuation)
        return cls(request_id, token_ids, num_prompt_tokens, max_output_tokens, stop_token_ids)

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
    def finish(self) -> Finish | None:
        """Why the answer is complete as it stands, or None."""
        if self.num_output_tokens and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_output_tokens else None

    def append(self, token_id: int) -> Finish | None:
        """Takes the next token of the answer; returns why the answer ends with it, or None."""
        self.token_ids.append(token_id)
        return self.finish
