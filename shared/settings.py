"""What the settings of both services have in common; read once, in `__main__`, from `LENSPAIR_*`."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.features.key import TENANT_NAME
from shared.features.manifest import StoreDtype

MIN_STORE_KEY_BYTES: Final = 16

TenantName = Annotated[str, StringConstraints(pattern=TENANT_NAME)]


class SharedSettings(BaseSettings):
    """Settings of any Lenspair service. Each field is the environment variable `LENSPAIR_<FIELD>`.

    All problems are reported together, with their names.
    """

    model_config = SettingsConfigDict(env_prefix="LENSPAIR_", frozen=True, extra="ignore")

    checkpoint: str = Field(description="Local directory or hub id of a Qwen3-VL checkpoint.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto takes CUDA where there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Compute dtype; auto is bfloat16 on CUDA and float32 on the CPU.",
    )
    torch_threads: int = Field(
        default=0, ge=0, description="CPU threads of the model; 0 takes the container's CPU quota."
    )

    store_url: SecretStr = Field(
        description="URL of the feature store: redis://, rediss:// or unix://, redis+sentinel:// or "
        "redis+cluster:// (rediss+... with TLS)."
    )
    store_key: SecretStr | None = Field(
        default=None,
        description="Secret that seals records (HMAC-SHA-256) in a store that others can write to; the same "
        f"for both services, random, at least {MIN_STORE_KEY_BYTES} bytes. Handing features over directly "
        "needs it.",
    )
    store_ttl_seconds: int = Field(default=300, ge=1, description="Time to live of a feature.")
    store_timeout_seconds: float = Field(
        default=2.0, gt=0, description="Longest wait for one answer of the store."
    )
    store_connections: int = Field(default=8, ge=1, description="Most connections to the store.")
    store_chunk_bytes: int = Field(
        default=4 * 1024 * 1024 - 64 * 1024,
        ge=4096,
        le=256 * 1024 * 1024,
        multiple_of=16,
        description="Bytes of one chunk; a little under a power of two suits Redis' allocator.",
    )
    store_dtype: StoreDtype = Field(
        default="model",
        description="What encoders write: model (the dtype that the tower computes in), bfloat16, or fp8 "
        "(about half of the bytes of bfloat16, and less exact). Decoders read all of them.",
    )

    listen: str = Field(default="[::]:50051", description="Address and port of the gRPC server.")
    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the Prometheus end point; 0 switches it off.",
    )
    reflection: bool = Field(default=False, description="Serve gRPC reflection.")
    max_message_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024 * 1024, description="Largest gRPC message, both ways."
    )
    default_deadline_seconds: float = Field(
        default=120.0, gt=0, description="Deadline of calls that bring none."
    )
    max_deadline_seconds: float = Field(
        default=3600.0, gt=0, description="Longest deadline; later ones are cut to it."
    )
    drain_notice_seconds: float = Field(
        default=0.0, ge=0, description="Wait between NOT_SERVING and refusing new calls."
    )
    drain_grace_seconds: float = Field(
        default=25.0, ge=0, description="How long open calls may go on after SIGTERM."
    )
    tenant_metadata: str = Field(
        default="",
        description="Name of the call metadata that names the tenant. Empty: one tenant for all. "
        "Only for networks in which callers are trusted.",
    )
    require_tenant: bool = Field(
        default=False,
        description="Refuse calls that name no tenant in LENSPAIR_TENANT_METADATA, but for health checks and "
        "reflection. Otherwise they belong to one common tenant.",
    )
    tenant_store_urls: dict[TenantName, SecretStr] = Field(
        default={},
        description="JSON object from names of tenants to store URLs: these tenants' features are kept in "
        "stores of their own, those of all others in LENSPAIR_STORE_URL. The same for both services.",
    )

    otlp_endpoint: str = Field(default="", description="OTLP gRPC end point for spans; empty: none.")
    log_format: Literal["json", "console"] = Field(default="json", description="Form of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level."
    )
    port_file: Path | None = Field(
        default=None, description="File that gets the bound port once the server accepts calls."
    )

    @field_validator("store_key")
    @classmethod
    def _store_key_is_no_word(cls, store_key: SecretStr | None) -> SecretStr | None:
        if store_key is not None and len(store_key.get_secret_value().encode()) < MIN_STORE_KEY_BYTES:
            raise ValueError(
                f"must have at least {MIN_STORE_KEY_BYTES} bytes; `openssl rand -base64 32` makes a good one"
            )
        return store_key

    @model_validator(mode="after")
    def _tenants_can_be_told_apart(self) -> Self:
        if (self.require_tenant or self.tenant_store_urls) and not self.tenant_metadata:
            raise ValueError(
                "LENSPAIR_REQUIRE_TENANT and LENSPAIR_TENANT_STORE_URLS need LENSPAIR_TENANT_METADATA"
            )
        return self

    @property
    def store_key_bytes(self) -> bytes | None:
        """The store key as it is hashed with; None without one."""
        return None if self.store_key is None else self.store_key.get_secret_value().encode()
