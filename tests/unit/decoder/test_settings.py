"""Settings that contradict each other are found at the start."""

import pytest
from pydantic import SecretStr, ValidationError

from decoder_service.app import context_tokens
from decoder_service.settings import DecoderSettings


def test_every_request_of_a_batch_gets_a_token() -> None:
    values = {"checkpoint": "somewhere", "store_url": SecretStr("redis://somewhere")}
    with pytest.raises(ValidationError, match="LENSPAIR_MAX_BATCH_TOKENS"):
        DecoderSettings.model_validate({**values, "max_batch_size": 32, "max_batch_tokens": 16})
    assert DecoderSettings.model_validate(values).max_batch_size == 16


REQUIRED = {"checkpoint": "somewhere", "store_url": SecretStr("redis://somewhere")}


@pytest.mark.parametrize("sources", ["*.encoder.svc:50051", "10.0.0.0/8,[fd00::]/8"])
def test_sources_need_the_store_key(sources: str) -> None:
    with pytest.raises(ValidationError, match="LENSPAIR_STORE_KEY"):
        DecoderSettings.model_validate({**REQUIRED, "allowed_sources": sources})
    sealed = {
        **REQUIRED,
        "allowed_sources": sources,
        "store_key": SecretStr("a key of thirty-two bytes and more"),
    }
    assert DecoderSettings.model_validate(sealed).allowed_sources == sources


def test_a_source_that_can_not_be_read_is_found_at_the_start() -> None:
    sealed = {
        **REQUIRED,
        "allowed_sources": "10.0.0.0/8,*",
        "store_key": SecretStr("a key of thirty-two bytes and more"),
    }
    with pytest.raises(ValidationError, match=r"'\*'"):
        DecoderSettings.model_validate(sealed)


def test_a_window_that_nobody_could_close_early_is_found_at_the_start() -> None:
    with pytest.raises(ValidationError, match="LENSPAIR_MIN_BATCH_SIZE"):
        DecoderSettings.model_validate({**REQUIRED, "max_batch_size": 4, "min_batch_size": 5})


@pytest.mark.parametrize(
    ("setting", "own", "in_cache", "context"),
    [(0, 4096, 10_000, 4096), (1000, 4096, 10_000, 1000), (0, 4096, 512, 512), (64, 4096, 80, 64)],
)
def test_the_context_is_what_setting_model_and_cache_allow(
    setting: int, own: int, in_cache: int, context: int
) -> None:
    """G25."""
    settings = DecoderSettings.model_validate({**REQUIRED, "max_context_tokens": setting})
    assert context_tokens(settings, own, in_cache) == context


@pytest.mark.parametrize(
    ("setting", "own", "in_cache", "named"),
    [
        (5000, 4096, 10_000, "LENSPAIR_ROPE_SCALING_FACTOR"),
        (0, 4096, 200, "LENSPAIR_KV_CACHE_BYTES"),
        (64, 4096, 32, "LENSPAIR_KV_CACHE_BYTES"),
    ],
)
def test_a_context_that_can_not_be_is_found_at_the_start(
    setting: int, own: int, in_cache: int, named: str
) -> None:
    settings = DecoderSettings.model_validate({**REQUIRED, "max_context_tokens": setting})
    with pytest.raises(ValueError, match=named):
        context_tokens(settings, own, in_cache)
