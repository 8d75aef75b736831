"""What callers pass in and get back; plain values that know no gRPC."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal


class Outcome(StrEnum):
    """How a feature was found."""

    HIT = "hit"
    ENCODED = "encoded"
    JOINED = "joined"
    NEAR = "near"


FinishReason = Literal["stop", "length", "unknown"]


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """The wishes of one request for its pictures and clips; what is None takes the server's default.

    Pixels are those of a picture, or of each frame of a clip; the last three are for clips alone, `fps` and
    `num_frames` exclude one another.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    do_resize: bool | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """A video file (MP4, WebM, AVI or GIF), or encoded pictures with the time of each in seconds."""

    file: bytes | Path | None = field(default=None, repr=False)
    frames: tuple[bytes, ...] = field(default=(), repr=False)
    timestamps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.file is None) == (not self.frames) or len(self.frames) != len(self.timestamps):
            raise ValueError("a clip is a file, or frames with as many timestamps")


Image = bytes | Path | Clip
"""What can be asked about: a picture by its bytes or its file, or a clip."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A reference to the features of one picture. `grid` is (t, h, w) in patches.

    `source` is empty for stored features; else the store did not take them, and it tells the decoder which
    encoder keeps them until `expires_at`.
    """

    key: str
    grid: tuple[int, int, int]
    token_count: int
    size_bytes: int
    expires_at: datetime
    outcome: Outcome
    source: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says: texts and features in their order."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[str | Feature, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is generated; what is None takes the server's default (greedy).

    The fields are those of lenspair.decoder.v1.GenerationTask and SamplingParams, where each is explained.
    At most one of `json_schema` (its text, or a dictionary), `regex` and `choices` says which form the answer
    must have. A whole answer can have several `samples`; a stream shows one, number `first_sample`, and the
    decoder computes the prompt of streams about the same question once.
    """

    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_output_tokens: int | None = None
    stop_sequences: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    top_logprobs: int | None = None
    continuation_token_ids: tuple[int, ...] = ()
    priority: Literal["low", "normal", "high"] | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    samples: int = 1
    first_sample: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token at one place of an answer, and the best candidates there, best first."""

    chosen: Candidate
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. `output_tokens` counts continuation tokens too."""

    input_tokens: int
    visual_tokens: int
    output_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers to a question."""

    sample_index: int
    text: str
    finish_reason: FinishReason
    output_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and how it came about. Times are in seconds.

    `features` are those of the pictures, in the order of the call, empty where the caller passed features
    itself. `time_to_first_token` and `queue_seconds` are the decoder's; `encode_seconds` is what finding
    and encoding the pictures took, `total_seconds` the whole call, both as the client saw them.
    `repeated` counts the steps that failed and were made again, `resumed` how often the answer went on at
    another decoder after its first tokens. Of several samples the first one is the answer, and
    `further_samples` are the others; `usage` counts the output of all.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    time_to_first_token: float
    queue_seconds: float
    features: tuple[Feature, ...] = ()
    encode_seconds: float = 0.0
    total_seconds: float = 0.0
    repeated: int = 0
    resumed: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    further_samples: tuple[Sample, ...] = ()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """How each picture's features were found."""
        return tuple(feature.outcome for feature in self.features)


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How long a prompt is."""

    input_tokens: int
    visual_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class FeatureDescription:
    """What is known of one stored feature. `created_at` is None for records of older encoders.

    The tensor has `feature.token_count` rows of `(1 + deepstack_levels) * hidden_size` values of `dtype`,
    in `num_chunks` pieces. `fingerprint` is that of the checkpoint that made it.
    """

    feature: Feature
    created_at: datetime | None
    dtype: str
    hidden_size: int
    deepstack_levels: int
    num_chunks: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What one encoder did for the caller's tenant since a point in time, None before the first request.

    `hit_rate` is the share of the features handed out that cost no computation; None before the first.
    """

    since: datetime | None
    hits: int
    joined: int
    encoded: int
    misses: int
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The stored features of the caller's tenant. What is not known is None.

    `damaged` manifests can't be read; the next read of each deletes it. `store_used_bytes` and
    `store_max_bytes` (0: no limit) are the whole store's memory, for all tenants.
    """

    entries: int
    size_bytes: int
    damaged: int
    oldest: datetime | None
    newest: datetime | None
    first_expiry: datetime | None
    last_expiry: datetime | None
    requests: RequestCounts
    store_used_bytes: int | None
    store_max_bytes: int | None
