"""The decoder's own settings; see shared/settings.py for what both services have in common."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shared.settings import SharedSettings


class DecoderSettings(SharedSettings):
    """Settings of the decoder service."""

    listen: str = Field(default="[::]:50052", description="Address and port of the gRPC server.")
    mode: Literal["batched", "single"] = Field(
        default="batched",
        description="single runs one request at a time: the roll-back switch of continuous batching.",
    )
    max_batch_size: int = Field(default=16, ge=1, description="Most requests in one step.")
    max_batch_tokens: int = Field(
        default=2048, ge=16, description="Most tokens in one step; longer prompts are cut into chunks."
    )
    max_waiting: int = Field(
        default=64, ge=0, description="Most requests that wait for a place; more are refused."
    )
    kv_cache_bytes: int = Field(
        default=1024**3, ge=1024**2, description="Memory for keys and values of live requests."
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
    max_prompt_characters: int = Field(
        default=1_000_000, ge=1, description="Most characters of all texts of a request."
    )
    max_output_tokens: int = Field(default=4096, ge=1, description="Most tokens that a request may ask for.")
    default_output_tokens: int = Field(
        default=512, ge=1, description="Output tokens of a request that does not say."
    )

    @model_validator(mode="after")
    def _every_request_gets_a_token(self) -> Self:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError("LENSPAIR_MAX_BATCH_TOKENS must be at least LENSPAIR_MAX_BATCH_SIZE")
        return self
