"""How a service's `__main__` explains its settings and reports what is wrong with them."""

from typing import Self

import pytest
from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.settings import SharedSettings
from shared.settings_help import describe_settings, parse_arguments


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="LENSPAIR_", frozen=True, extra="ignore")

    name: str = Field(description="What it is called.")
    size: int = Field(default=3, ge=1, description="How large it is.")
    secret: SecretStr = Field(default=SecretStr("hidden-default"), description="What nobody may see.")
    ports: tuple[int, ...] = Field(default=(), description="Where it listens.")

    @model_validator(mode="after")
    def name_fits(self) -> Self:
        if len(self.name) > self.size:
            raise ValueError("the name is longer than the size")
        return self


def parse(arguments: list[str]) -> Settings:
    return parse_arguments("service", "A service.", Settings, arguments)


def test_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSPAIR_NAME", "abc")
    assert parse([]).name == "abc"


def test_help_names_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "LENSPAIR_NAME (required)" in text
    assert "LENSPAIR_SIZE (default 3)" in text
    assert "How large it is." in text
    assert "hidden-default" not in text


def test_all_problems_are_reported_together_without_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LENSPAIR_SIZE", "a-secret-value")
    with pytest.raises(SystemExit) as end:
        parse([])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "LENSPAIR_NAME: is required, and is not set" in text
    assert "LENSPAIR_SIZE: Input should be a valid integer" in text
    assert "a-secret-value" not in text


def test_a_check_over_several_settings_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LENSPAIR_NAME", "longer than three")
    with pytest.raises(SystemExit):
        parse([])
    assert "the name is longer than the size" in capsys.readouterr().err


def test_a_value_that_is_no_json_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LENSPAIR_NAME", "abc")
    monkeypatch.setenv("LENSPAIR_PORTS", "a-secret-value")
    with pytest.raises(SystemExit) as end:
        parse([])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "ports" in text.lower()
    assert "a-secret-value" not in text


def test_every_shared_setting_is_described() -> None:
    text = describe_settings(SharedSettings)
    for name, field in SharedSettings.model_fields.items():
        assert f"LENSPAIR_{name.upper()}" in text
        assert field.description
