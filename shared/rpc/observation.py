"""What operators see of a call: one span, three metrics, one log line; no payloads, no key material."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc.aio
import structlog
from opentelemetry import propagate, trace
from prometheus_client import Counter, Gauge, Histogram

from shared.errors import LenspairError
from shared.rpc import status

# The name of this attribute is in flux in the semantic conventions; it stands here only.
STATUS_ATTRIBUTE = "rpc.response.status_code"

_HANDLED = Counter(
    "grpc_server_handled_total",
    "Calls that ended, by status code.",
    ["grpc_service", "grpc_method", "grpc_code"],
)
_SECONDS = Histogram(
    "grpc_server_handling_seconds",
    "Time from the arrival of a call to its end.",
    ["grpc_service", "grpc_method"],
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30, 60, 120, 300),
)
_IN_FLIGHT = Gauge(
    "lenspair_rpc_calls_in_flight", "Calls that have not ended.", ["grpc_service", "grpc_method"]
)

_log = structlog.get_logger("lenspair.rpc")
_tracer = trace.get_tracer("lenspair.rpc")


class MethodName(NamedTuple):
    """A method as metrics and spans name it."""

    service: str
    method: str

    @classmethod
    def parse(cls, path: str | bytes) -> "MethodName":
        text = path.decode(errors="replace") if isinstance(path, bytes) else path
        service, _, method = text.removeprefix("/").rpartition("/")
        return cls(service, method)

    def __str__(self) -> str:
        return f"{self.service}/{self.method}"


# Whatever a caller invents as a method has this name, so that it can't grow the number of series.
UNKNOWN_METHOD = MethodName("unknown", "unknown")


@dataclass(slots=True)
class Observation:
    """What is learnt about one call while it runs: the error that its handler raised, if any."""

    error: BaseException | None = None


@contextmanager
def observed(name: MethodName, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[Observation]:
    """Makes the span, the metrics and the log line of one call; the span is current in the block."""
    observation = Observation()
    started = time.perf_counter()
    with _IN_FLIGHT.labels(*name).track_inprogress(), _server_span(name, context) as span:
        try:
            yield observation
        except asyncio.CancelledError as cancelled:
            observation.error = observation.error or cancelled
            raise
        finally:
            code = _code_of(observation.error, context)
            seconds = time.perf_counter() - started
            _end_span(span, code)
            _HANDLED.labels(*name, code.name).inc()
            _SECONDS.labels(*name).observe(seconds)
            _log_call(name, code, seconds, observation.error)


def count_unknown_method() -> None:
    """Counts a call of a method that nobody serves; gRPC answers it before any handler runs."""
    _HANDLED.labels(*UNKNOWN_METHOD, status.UNIMPLEMENTED.name).inc()


def _server_span(
    name: MethodName, context: grpc.aio.ServicerContext[Any, Any]
) -> AbstractContextManager[trace.Span]:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return _tracer.start_as_current_span(
        str(name),
        propagate.extract(metadata),
        trace.SpanKind.SERVER,
        {"rpc.system.name": "grpc", "rpc.method": str(name)},
        record_exception=False,
        set_status_on_exception=False,
    )


def _code_of(error: BaseException | None, context: grpc.aio.ServicerContext[Any, Any]) -> status.Code:
    match error:
        case None:  # an answer, or an abort of the handler's own
            return status.code_named(context.code())
        case asyncio.CancelledError():
            remaining: float | None = context.time_remaining()
            is_expired = remaining is not None and remaining <= 0
            return status.DEADLINE_EXCEEDED if is_expired else status.CANCELLED
        case _:
            return status.code_of(error)


def _end_span(span: trace.Span, code: status.Code) -> None:
    span.set_attribute(STATUS_ATTRIBUTE, code.name)
    if code is not status.OK:
        span.set_attribute("error.type", code.name)
        span.set_status(trace.StatusCode.ERROR)


def _log_call(name: MethodName, code: status.Code, seconds: float, error: BaseException | None) -> None:
    fields = {"method": str(name), "code": code.name, "seconds": round(seconds, 4)}
    if isinstance(error, LenspairError):
        fields["reason"] = error.reason
    if code is status.INTERNAL and error is not None:
        _log.error("call failed", **fields, exc_info=error)
    else:
        _log.info("call ended", **fields)
