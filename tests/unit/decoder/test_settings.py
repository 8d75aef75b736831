"""Settings that contradict each other are found at the start."""

import pytest
from pydantic import SecretStr, ValidationError

from decoder_service.settings import DecoderSettings


def test_every_request_of_a_batch_gets_a_token() -> None:
    values = {"checkpoint": "somewhere", "store_url": SecretStr("redis://somewhere")}
    with pytest.raises(ValidationError, match="LENSPAIR_MAX_BATCH_TOKENS"):
        DecoderSettings.model_validate({**values, "max_batch_size": 32, "max_batch_tokens": 16})
    assert DecoderSettings.model_validate(values).max_batch_size == 16
