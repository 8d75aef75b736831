"""The settings of the encoder service, on top of those of any service."""

from pydantic import Field

from shared.settings import SharedSettings


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
    decode_threads: int = Field(default=2, ge=1, description="Pictures that are decoded at the same time.")

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

    max_keep_alive_seconds: int = Field(
        default=24 * 60 * 60,
        ge=1,
        le=10 * 365 * 24 * 60 * 60,
        description="Longest time to live that KeepAlive may give a stored feature.",
    )
