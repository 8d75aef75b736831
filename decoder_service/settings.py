"""The decoder's own settings; see shared/settings.py for what both services have in common."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from decoder_service.allowed_sources import AllowedSources
from shared.settings import SharedSettings


class DecoderSettings(SharedSettings):
    """Settings of the decoder service."""

    listen: str = Field(default="[::]:50052", description="Address and port of the gRPC server.")
    mode: Literal["batched", "single"] = Field(
        default="batched",
        description="single runs one request at a time: the roll-back switch of continuous batching.",
    )
    mode_file: Path | None = Field(
        default=None,
        description="A file that holds batched or single, looked at every second: the mode switches while "
        "the decoder runs. LENSPAIR_MODE holds until it can be read.",
    )
    max_batch_size: int = Field(default=16, ge=1, description="Most requests in one step.")
    max_batch_tokens: int = Field(
        default=2048, ge=16, description="Most tokens in one step; longer prompts are cut into chunks."
    )
    max_waiting: int = Field(
        default=64, ge=0, description="Most requests that wait for a place; more are refused."
    )
    batch_window_ms: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Longest wait of a request for company, while fewer than LENSPAIR_MIN_BATCH_SIZE are "
        "there; 0: none waits.",
    )
    min_batch_size: int = Field(
        default=1, ge=1, description="Requests that end LENSPAIR_BATCH_WINDOW_MS for all who wait."
    )
    kv_cache_bytes: int = Field(
        default=1024**3,
        ge=1024**2,
        description="Memory for keys and values: of live requests, and of prefixes that may come again.",
    )
    max_pending_feature_bytes: int = Field(
        default=1024**3,
        ge=1024**2,
        description="Most bytes of fetched features that wait for their first token.",
    )
    feature_cache_bytes: int = Field(
        default=1024**3,
        ge=0,
        description="Memory for features that were fetched, so that a hot picture crosses the network once; "
        "0 switches this cache off.",
    )
    feature_cache_entries: int = Field(default=1000, ge=1, description="Most features in that cache.")
    max_context_tokens: int = Field(
        default=0,
        ge=0,
        description="Most prompt and output tokens of a request; 0 takes the checkpoint's own limit.",
    )
    rope_scaling_factor: float = Field(
        default=1.0,
        ge=1,
        le=64,
        description="How many times longer than the checkpoint's own its context becomes, by YaRN; 1 leaves "
        "it as it is.",
    )
    max_prompt_characters: int = Field(
        default=1_000_000, ge=1, description="Most characters of all texts of a request."
    )
    max_output_tokens: int = Field(default=4096, ge=1, description="Most tokens that a request may ask for.")
    default_output_tokens: int = Field(
        default=512, ge=1, description="Output tokens of a request that does not say."
    )
    allowed_sources: str = Field(
        default="",
        description="Encoders that features may be fetched from directly when the store lacks them: exact "
        "hosts, *.suffix or networks (IPv6 in brackets), with commas between them, each for any port or with "
        ":port; empty: none. Needs LENSPAIR_STORE_KEY.",
    )

    @field_validator("allowed_sources")
    @classmethod
    def _is_a_list_of_sources(cls, text: str) -> str:
        AllowedSources.parse(text)
        return text

    @model_validator(mode="after")
    def _hand_over_is_sealed(self) -> Self:
        if self.allowed_sources and self.store_key is None:
            raise ValueError("LENSPAIR_ALLOWED_SOURCES needs LENSPAIR_STORE_KEY")
        return self

    @model_validator(mode="after")
    def _every_request_gets_a_token(self) -> Self:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError("LENSPAIR_MAX_BATCH_TOKENS must be at least LENSPAIR_MAX_BATCH_SIZE")
        if self.min_batch_size > self.max_batch_size:
            raise ValueError("LENSPAIR_MIN_BATCH_SIZE must be at most LENSPAIR_MAX_BATCH_SIZE")
        return self
