"""What both services refuse in their settings, and what they never show of them."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from decoder_service.settings import DecoderSettings
from encoder_service.settings import EncoderSettings
from shared.settings import SharedSettings
from shared.settings_help import describe_settings, parse_arguments

SECRET = "rediss://shop:pass-word@shop-store:6379"
REQUIRED = {"CHECKPOINT": "somewhere", "STORE_URL": "redis://:common-word@store"}


@pytest.fixture(params=[EncoderSettings, DecoderSettings])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[SharedSettings]:
    """The settings of a service, with what it needs in the environment."""
    for name, value in REQUIRED.items():
        monkeypatch.setenv(f"LENSPAIR_{name}", value)
    settings: type[SharedSettings] = request.param
    return settings


def complaint(kind: type[SharedSettings], capsys: pytest.CaptureFixture[str]) -> str:
    """What an operator reads who starts a service with settings that can't be used."""
    with pytest.raises(SystemExit) as end:
        parse_arguments("service", "A service.", kind, [])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("store_key", ["", "secret", "x" * 15])
def test_a_weak_store_key_is_refused(
    kind: type[SharedSettings],
    store_key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LENSPAIR_STORE_KEY", store_key)
    text = complaint(kind, capsys)
    assert "LENSPAIR_STORE_KEY: Value error, must have at least 16 bytes" in text
    assert not store_key or store_key not in text


def test_a_store_key_is_measured_in_bytes_and_never_shown(
    kind: type[SharedSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LENSPAIR_STORE_KEY", "ä" * 8)
    settings = kind()  # type: ignore[call-arg]  # from the environment
    assert settings.store_key is not None
    assert settings.store_key.get_secret_value() == "ä" * 8
    assert "ä" not in f"{settings!r} {settings}"


@pytest.mark.parametrize(
    "variables", [{"REQUIRE_TENANT": "true"}, {"TENANT_STORE_URLS": json.dumps({"shop": SECRET})}]
)
def test_tenants_need_the_metadata_that_names_them(
    kind: type[SharedSettings],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"LENSPAIR_{name}", value)
    text = complaint(kind, capsys)
    assert "LENSPAIR_TENANT_METADATA" in text
    assert "pass-word" not in text
    monkeypatch.setenv("LENSPAIR_TENANT_METADATA", "x-tenant")
    assert kind().tenant_metadata == "x-tenant"  # type: ignore[call-arg]  # from the environment


@pytest.mark.parametrize(
    "urls",
    [
        SECRET,
        json.dumps([SECRET]),
        json.dumps({"two words": SECRET}),
        json.dumps({"": SECRET}),
        json.dumps({"shop": [SECRET]}),
        json.dumps({"shop": 6379, "other": SECRET}),
        json.dumps({"shop": SECRET})[:-1],
    ],
)
def test_what_is_no_map_from_tenants_to_urls_is_refused_without_repeating_it(
    kind: type[SharedSettings],
    urls: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LENSPAIR_TENANT_METADATA", "x-tenant")
    monkeypatch.setenv("LENSPAIR_TENANT_STORE_URLS", urls)
    text = complaint(kind, capsys)
    assert "tenant_store_urls" in text.lower()
    assert "pass-word" not in text


def test_urls_of_tenants_are_never_shown(
    kind: type[SharedSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LENSPAIR_TENANT_METADATA", "x-tenant")
    monkeypatch.setenv("LENSPAIR_TENANT_STORE_URLS", json.dumps({"shop": SECRET}))
    settings = kind()  # type: ignore[call-arg]  # from the environment
    assert settings.tenant_store_urls["shop"].get_secret_value() == SECRET
    assert "LENSPAIR_TENANT_STORE_URLS (unset)" in describe_settings(kind)
    shown: list[Any] = [settings, repr(settings), settings.model_dump(), settings.model_dump_json()]
    assert "pass-word" not in f"{shown} {describe_settings(kind)}"
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({**settings.model_dump(), "torch_threads": -1})
    assert "pass-word" not in str(caught.value)
