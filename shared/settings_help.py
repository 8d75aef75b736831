"""Reads a service's settings from the environment for its `__main__`, and explains them with --help."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsError

SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def parse_arguments(
    prog: str, description: str, settings_class: type[SettingsT], arguments: Sequence[str] | None = None
) -> SettingsT:
    """The settings of this process. Ends it with --help (0), or with all problems on stderr (2)."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=describe_settings(settings_class),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    try:
        return settings_class()
    except (ValidationError, SettingsError) as error:
        problems = "\n".join(f"  {line}" for line in describe_problems(settings_class, error))
        sys.stderr.write(f"{prog}: the settings can't be used:\n{problems}\n({prog} --help lists them all)\n")
        raise SystemExit(2) from None


def describe_settings(settings_class: type[BaseSettings]) -> str:
    """One paragraph for each setting: its variable, its default, what it does."""
    lines = ["settings, from the environment:"]
    for name, field in settings_class.model_fields.items():
        lines.append(f"  {variable_of(settings_class, name)} ({_default_of(field)})")
        lines += textwrap.wrap(field.description or "", 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def describe_problems(
    settings_class: type[BaseSettings], error: ValidationError | SettingsError
) -> list[str]:
    """One line for each problem, with the variable's name and never with its value."""
    if isinstance(error, SettingsError):
        return [str(error)]
    return [
        f"{_variable_at(settings_class, problem['loc'])}: {_sentence(problem)}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    ]


def variable_of(settings_class: type[BaseSettings], field: str) -> str:
    """The environment variable of a field."""
    return f"{settings_class.model_config.get('env_prefix', '')}{field}".upper()


def _variable_at(settings_class: type[BaseSettings], location: tuple[int | str, ...]) -> str:
    # A check over several settings has no place of its own.
    return variable_of(settings_class, str(location[0])) if location else "together"


def _sentence(problem: Any) -> str:
    return "is required, and is not set" if problem["type"] == "missing" else str(problem["msg"])


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value in (None, "", {}) else f"default {value}"
