"""Settings that contradict each other are found at the start."""

import pytest
from pydantic import SecretStr, ValidationError

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
