"""What the process does around the service: its settings, its cores, its command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from encoder_service import app
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.settings import EncoderSettings
from shared.cpu import available_cores
from shared.errors import InvalidMediaSettings

HELP = """
import sys
from encoder_service.__main__ import main
sys.argv = ["encoder_service", "--help"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def settings(**values: object) -> EncoderSettings:
    required = {"checkpoint": "somewhere", "store_url": SecretStr("redis://somewhere")}
    return EncoderSettings.model_validate(required | values)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("150000 100000", 2), ("20000 100000", 1), ("800000 100000", 8), ("junk", 64)],
)
def test_the_quota_of_the_container_counts(tmp_path: Path, quota: str, cores: int) -> None:
    cpu_max = tmp_path / "cpu.max"
    cpu_max.write_text(quota)
    assert available_cores(cpu_max) == min(cores, len(os.sched_getaffinity(0)))


def test_without_a_container_all_cores_count(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


# I15: the server's setting means the same as the request's
def test_a_budget_of_the_operator_replaces_the_checkpoints(hub_preprocessor: ImagePreprocessor) -> None:
    policy = app.pixel_policy(settings(default_max_pixels=200_000), hub_preprocessor)
    assert (policy.default_min_pixels, policy.default_max_pixels) == (65_536, 200_000)
    assert policy.limit_max_pixels == 16_777_216


def test_a_budget_that_can_not_be_is_found_at_the_start(hub_preprocessor: ImagePreprocessor) -> None:
    with pytest.raises(InvalidMediaSettings):
        app.pixel_policy(settings(default_max_pixels=1000), hub_preprocessor)


def test_the_defaults_fit_together() -> None:
    defaults = settings()
    assert defaults.max_media_bytes < defaults.max_message_bytes
    limits = app.batch_limits(defaults)
    assert limits.max_batch_cost <= limits.max_queue_cost
    assert limits.max_batch_items <= limits.max_queue_items


def test_help_explains_every_setting_without_loading_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("False\n")
    for name in EncoderSettings.model_fields:
        assert f"LENSPAIR_{name.upper()}" in shown


def test_an_advertised_address_needs_the_store_key() -> None:
    with pytest.raises(ValidationError, match="LENSPAIR_STORE_KEY"):
        settings(advertised_address="10.0.0.7:50051")
    sealed = settings(
        advertised_address="[FD00:0::7]:50051", store_key=SecretStr("a key of thirty-two bytes and more")
    )
    assert sealed.advertised_address == "[fd00::7]:50051"


@pytest.mark.parametrize(
    "address", ["10.0.0.7", "fd00::7:50051", "http://encoder:50051", ":50051", "[::]:50051", "0.0.0.0:50051"]
)
def test_an_address_that_nobody_can_reach_is_found_at_the_start(address: str) -> None:
    with pytest.raises(ValidationError, match="advertised_address"):
        settings(advertised_address=address, store_key=SecretStr("a key of thirty-two bytes and more"))
