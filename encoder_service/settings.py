"""The settings of the encoder service, on top of those of any service."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from shared.features.source import Address
from shared.settings import SharedSettings
from shared.store.leases import MAX_LEASE_SECONDS


class EncoderSettings(SharedSettings):
    """Each field is the environment variable `LENSPAIR_<FIELD>`."""

    default_min_pixels: int | None = Field(
        default=None, ge=1, description="min_pixels of requests that set none; unset: the checkpoint's own."
    )
    default_max_pixels: int | None = Field(
        default=None, ge=1, description="max_pixels of requests that set none; unset: the checkpoint's own."
    )
    limit_max_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Highest max_pixels that a request may set; unset: the checkpoint's own max_pixels.",
    )
    limit_min_pixels: int = Field(
        default=1024 * 1024,
        ge=1,
        description="Highest min_pixels that a request may set: how far a small picture may be enlarged.",
    )

    max_media_bytes: int = Field(
        default=48 * 1024 * 1024,
        ge=1024,
        description="Most bytes of one encoded picture. What exceeds a message comes by StreamEncode.",
    )
    max_source_pixels: int = Field(
        default=64_000_000, ge=1, description="Most pixels of a picture before resizing, by its header."
    )
    max_source_side: int = Field(
        default=32_768, ge=1, description="Longest side of a picture before resizing, by its header."
    )
    limit_total_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Highest total_pixels of a clip that a request may set, and the default; unset: the "
        "checkpoint's own.",
    )
    default_fps: float = Field(
        default=2.0,
        gt=0,
        le=240,
        description="Frames per second of clips whose requests set neither fps nor num_frames.",
    )
    max_clip_frames: int = Field(default=768, ge=1, description="Most frames of a clip that are looked at.")
    max_clip_source_frames: int = Field(
        default=100_000, ge=1, description="Most frames of a clip's file, looked at or not."
    )
    max_clip_seconds: float = Field(default=3600.0, gt=0, description="Longest clip.")
    decode_processes: int = Field(
        default=2, ge=1, description="Processes that decode media, one picture or clip each at a time."
    )
    decode_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=64 * 1024 * 1024,
        description="Most memory that decoding one picture or clip may take, beyond its process' own.",
    )
    decode_seconds: int = Field(
        default=60, ge=1, description="Longest time that decoding one picture or clip may take."
    )

    max_batch_patches: int = Field(
        default=4096,
        ge=1,
        description="Most patches of one pass of the vision tower. A larger picture goes alone.",
    )
    max_batch_items: int = Field(
        default=64, ge=1, description="Most pictures of one pass of the vision tower."
    )
    batch_window_ms: float = Field(
        default=2.0, ge=0, description="How long the first picture of a pass waits for company."
    )
    max_queue_items: int = Field(
        default=256, ge=1, description="Most pictures that wait or are prepared; more get QUEUE_FULL."
    )
    max_queue_patches: int = Field(
        default=65_536,
        ge=1,
        description="Most patches that wait or are prepared (6 KiB each); more get QUEUE_FULL.",
    )

    lease_seconds: float = Field(
        default=5.0,
        ge=0.1,
        le=MAX_LEASE_SECONDS,
        description="How long an encoder that died keeps others from the picture that it was computing. "
        "Leases take up to three more connections to the store.",
    )
    max_keep_alive_seconds: int = Field(
        default=24 * 60 * 60,
        ge=1,
        le=10 * 365 * 24 * 60 * 60,
        description="Longest time to live that KeepAlive may give a stored feature.",
    )
    advertised_address: str = Field(
        default="",
        description="host:port under which decoders reach this very process, to fetch features that the "
        "store did not take; empty: nothing is handed over. Needs LENSPAIR_STORE_KEY.",
    )
    hand_over_bytes: int = Field(
        default=256 * 1024 * 1024, ge=1, description="Most bytes of features that are kept to be handed over."
    )
    hand_over_seconds: float = Field(
        default=60.0, gt=0, description="How long a feature is kept to be handed over."
    )

    @field_validator("advertised_address")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        if not text:
            return text
        address = Address.parse(text)
        if address.ip is not None and (address.ip.is_unspecified or address.ip.is_multicast):
            raise ValueError(f"decoders can't reach this very process under {address}")
        return str(address)

    @model_validator(mode="after")
    def _hand_over_is_sealed(self) -> Self:
        if self.advertised_address and self.store_key is None:
            raise ValueError("LENSPAIR_ADVERTISED_ADDRESS needs LENSPAIR_STORE_KEY")
        return self
