"""What the decoder service asks of an engine; knows neither text nor the store.

An engine turns prompts of token ids (with features at their visual positions) into tokens, for many
requests at once. Text, stop sequences and keys are the business of the layers above.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoder_service.engine.sequence import Priority
from shared.features.bundle import FeatureBundle


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen.

    `temperature` 0 is greedy; `top_p` in [0, 1], where 0 keeps the best token alone; `top_k` 0 keeps all.
    `min_p` drops tokens below this share of the best one's probability. `repetition_penalty` counts the
    tokens of prompt (but not its visual positions) and answer, `presence_penalty` and `frequency_penalty`
    those of the answer; `logit_bias` has (token id, what is added to its logit) pairs. With a `seed`, the
    noise at token t depends on (seed, t, `sample_index`) alone. `top_logprobs` asks for the best candidates
    at each place (0: the chosen token's alone; None: nothing).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    sample_index: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """When one request's generation ends.

    Counts include `continuation` tokens. Tokens of `stop_token_ids` end the answer and are not part of it;
    they are not chosen before `min_output_tokens`.
    """

    max_output_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the language model sees it.

    `positions` holds one (temporal, height, width) triple for each token: M-RoPE. Generated token number
    n (from 0) has the position `next_position + n` on all three axes. `visual_spans` says where in
    `token_ids` the tokens of each feature stand, in the order of `GenerationRequest.features`: (start,
    count) pairs, several for a clip, whose temporal patches stand apart.
    """

    token_ids: tuple[int, ...]
    positions: tuple[tuple[int, int, int], ...]
    next_position: int
    visual_spans: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def visual_tokens(self) -> int:
        return sum(count for spans in self.visual_spans for _, count in spans)


class FeatureTensors(Protocol):
    """The tensors behind one request's features, got when its prefill needs them and no earlier.

    A prompt that the prefix cache covers needs none; one that lost its blocks may need them again.
    """

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        """The features from number `first` of the prompt on. What it raises ends the request."""

    def release(self) -> None:
        """Nobody needs what was loaded any more, until the next `load`; may be called at any time."""


class NoTensors:
    """The FeatureTensors of a prompt without pictures."""

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        assert first == 0
        return ()

    def release(self) -> None:
        """Nothing was loaded."""


class TokenGrammar(Protocol):
    """Which tokens the form of one answer allows next. Called on the model thread, and never slow there:
    masks are computed elsewhere, from the moment on that a token is accepted.
    """

    def mask(self) -> NDArray[np.int32]:
        """Bit `t % 32` of word `t // 32` is set where token t may come next; waits until it is known.

        A LenspairError that it raises ends the request.
        """

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that the last mask allowed."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request to an engine. `request_id` is unique among live requests.

    `feature_ids` say what the features are, one for each of `prompt.visual_spans`: equal ids mean equal
    tensors. Blocks of the KV cache are shared between prompts that begin with the same tokens and features,
    and whose `prefix_root` is the same. `grammar`, if any, has already accepted `continuation`, which are
    tokens of this answer that were generated before; decoding resumes after them.
    """

    request_id: str
    prompt: Prompt
    features: FeatureTensors
    sampling: Sampling
    limits: Limits
    feature_ids: tuple[bytes, ...] = ()
    prefix_root: bytes = b""
    continuation: tuple[int, ...] = ()
    priority: Priority = Priority.NORMAL
    grammar: TokenGrammar | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and the natural logarithm of its probability, before temperature and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token, or the end of the answer.

    `finish` is None while the answer goes on, "stop" or "length" in the last output. The last output has
    no token when a stop token ended the answer (`token_id` is None then).
    """

    token_id: int | None
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics; `preempted` requests and `evicted` blocks are counted from the start on."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_total: int
    preempted: int = 0
    evicted: int = 0


@dataclass(slots=True)
class RequestTimings:
    """Monotonic seconds of one request, filled in by the engine as it happens.

    `reused_tokens` are prompt tokens whose keys and values were in the cache when it was first scheduled.
    """

    submitted: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    reused_tokens: int = field(default=0)


class Engine(Protocol):
    """Generates for many requests at once; every method is called on the event loop."""

    @property
    def context_tokens(self) -> int:
        """Most prompt and output tokens of one request together."""

    def generate(
        self, request: GenerationRequest, timings: RequestTimings
    ) -> AsyncGenerator[tuple[TokenOutput, ...], None]:
        """Submits at once and yields all tokens that have come since the last time, until one has `finish`.

        A slow reader finds several at a time; it never delays a step. Closing the iterator (or cancelling
        the task that reads it) takes the request out of the batch before its next step. Raises QueueFull at
        once when too many requests wait, and what `features.load` raises when it does.
        """

    def stats(self) -> EngineStats:
        """How busy the engine is."""

    async def close(self) -> None:
        """Ends every request that still runs with Draining, then the loop."""
