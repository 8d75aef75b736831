"""Log lines, as a reader of them sees them."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider

from shared.settings import SharedSettings
from shared.telemetry import set_up, set_up_logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_ours_and_the_libraries_lines_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info")
    structlog.get_logger("ours").info("call ended", code="OK")
    logging.getLogger("library").warning("odd %s", "thing")
    ours, library = lines(capsys)
    assert (ours["event"], ours["code"], ours["level"], ours["logger"]) == (
        "call ended",
        "OK",
        "info",
        "ours",
    )
    assert (library["event"], library["level"], library["logger"]) == ("odd thing", "warning", "library")
    assert str(library["timestamp"]).endswith("Z")


def test_lines_under_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "warning")
    structlog.get_logger("ours").info("unheard")
    logging.getLogger("library").info("unheard")
    assert lines(capsys) == []


def test_lines_inside_a_span_name_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info")
    with TracerProvider().get_tracer("test").start_as_current_span("span") as span:
        structlog.get_logger("ours").info("inside")
    structlog.get_logger("ours").info("outside")
    inside, outside = lines(capsys)
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert "trace_id" not in outside


def test_an_exception_is_one_line_of_json_without_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("json", "info")
    payload = "a payload"
    try:
        int(payload[:1])
    except ValueError as error:
        structlog.get_logger("ours").error("failed", exc_info=error)
    (line,) = lines(capsys)
    assert "ValueError: invalid literal" in str(line["exception"])
    assert payload not in str(line["exception"])


def test_the_console_has_colours_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("console", "info")
    structlog.get_logger("ours").info("call ended", code="OK")
    text = capsys.readouterr().err
    assert "call ended" in text
    assert "\x1b" not in text
    assert not sys.stderr.isatty()


def test_without_ports_and_end_points_nothing_is_started() -> None:
    settings = SharedSettings(checkpoint="unused", store_url="redis://unused")  # type: ignore[arg-type]
    telemetry = set_up(settings, "test")
    assert telemetry.metrics_port is None
    telemetry.shutdown()
