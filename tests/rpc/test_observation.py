"""What operators see of calls: spans, metrics, log lines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from shared.errors import FeatureNotFound
from shared.rpc.observation import STATUS_ATTRIBUTE
from tests.rpc.servers import Running, eventually, failure_of, running, texts_of
from tests.rpc.services import SERVICE, Behaviours, Context, delta

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"),)


async def span_after(spans: InMemorySpanExporter) -> ReadableSpan:
    """The one span of the call that has just ended; the caller may see the end before the server does."""
    await eventually(lambda: bool(spans.get_finished_spans()))
    (span,) = spans.get_finished_spans()
    return span


def handled(method: str, code: str) -> float:
    labels = {"grpc_service": SERVICE, "grpc_method": method, "grpc_code": code}
    return REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0.0


def in_flight(method: str) -> float:
    labels = {"grpc_service": SERVICE, "grpc_method": method}
    return REGISTRY.get_sample_value("lenspair_rpc_calls_in_flight", labels) or 0.0


async def make_call(server: Running, method: str) -> None:
    """Makes one call of a method that ends by itself or that the caller cancels."""
    match method:
        case "Answer":
            await server.unary("Answer")
        case "Stream" | "Write":
            await texts_of(server.stream(method))
        case "Abort" | "Fail":
            await failure_of(server.unary(method))
        case "StreamThenFail":
            await failure_of(server.stream(method))
        case "Hang":
            await failure_of(server.unary(method, seconds=0.1))
        case "StreamThenHang":
            await failure_of(server.stream(method))
        case "StreamForever":
            call = server.stream(method)
            await call.read()
            call.cancel()


NINE_CASES = [
    ("Answer", "OK"),
    ("Stream", "OK"),
    ("Write", "OK"),
    ("Abort", "ALREADY_EXISTS"),
    ("Fail", "NOT_FOUND"),
    ("StreamThenFail", "NOT_FOUND"),
    ("Hang", "DEADLINE_EXCEEDED"),
    ("StreamThenHang", "DEADLINE_EXCEEDED"),
    ("StreamForever", "CANCELLED"),
]


@pytest.mark.parametrize(("method", "code"), NINE_CASES)
async def test_each_end_of_a_call_is_seen_once(method: str, code: str, spans: InMemorySpanExporter) -> None:
    before = handled(method, code)
    async with running(Behaviours(error=FeatureNotFound(["k"])), default_deadline_seconds=0.15) as server:
        with capture_logs() as lines:
            await make_call(server, method)
            span = await span_after(spans)
    assert span.name == f"{SERVICE}/{method}"
    assert span.kind is trace.SpanKind.SERVER
    attributes = dict(span.attributes or {})
    assert attributes["rpc.system.name"] == "grpc"
    assert attributes["rpc.method"] == f"{SERVICE}/{method}"
    assert attributes[STATUS_ATTRIBUTE] == code
    assert attributes.get("error.type") == (None if code == "OK" else code)
    assert span.status.is_ok or code != "OK"
    assert not span.events
    assert handled(method, code) == before + 1
    assert in_flight(method) == 0
    assert [(line["method"], line["code"]) for line in lines if "method" in line] == [
        (f"{SERVICE}/{method}", code)
    ]


async def test_a_fault_of_ours_is_logged_with_its_traceback() -> None:
    async with running(Behaviours(error=KeyError("what went wrong"))) as server:
        with capture_logs() as lines:
            await make_call(server, "Fail")
    (line,) = [line for line in lines if "method" in line]
    assert line["log_level"] == "error"
    assert isinstance(line["exc_info"], KeyError)


async def test_the_span_continues_the_callers_trace(spans: InMemorySpanExporter) -> None:
    async with running() as server:
        await server.unary("Answer", metadata=TRACEPARENT)
        span = await span_after(spans)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID


class Traced(Behaviours):
    """Makes a span at every step of a stream, and in a task that the stream starts."""

    async def stream(self, request: Any, context: Context) -> AsyncIterator[Any]:
        tracer = trace.get_tracer("test")
        for text in ("a", "b"):
            with tracer.start_as_current_span(f"step {text}"):
                await asyncio.sleep(0)
            yield delta(text)
        await asyncio.create_task(self._work(tracer))

    async def _work(self, tracer: trace.Tracer) -> None:
        with tracer.start_as_current_span("task"):
            structlog.get_logger("test").info("working")


async def test_spans_inside_a_stream_belong_to_its_trace(spans: InMemorySpanExporter) -> None:
    """R18."""
    async with running(Traced()) as server:
        await texts_of(server.stream("Stream"))
        await eventually(lambda: len(spans.get_finished_spans()) == 4)
    by_name = {span.name: span for span in spans.get_finished_spans()}
    call = by_name.pop(f"{SERVICE}/Stream").get_span_context()
    assert call is not None
    assert set(by_name) == {"step a", "step b", "task"}
    for span in by_name.values():
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (call.trace_id, call.span_id)


async def test_whatever_callers_send_the_number_of_series_stays() -> None:
    """R21."""
    async with running(tenant_metadata="x-tenant") as server:
        await server.unary("Answer")
        await failure_of(server.unary("Nope"))
        before = number_of_series()
        for number in range(50):
            await failure_of(server.unary(f"Invented{number}"))
            await server.unary("Answer", metadata=(("x-tenant", f"tenant-{number}"),))
        assert number_of_series() == before
    unknown = {"grpc_service": "unknown", "grpc_method": "unknown", "grpc_code": "UNIMPLEMENTED"}
    assert (REGISTRY.get_sample_value("grpc_server_handled_total", unknown) or 0) >= 51


async def test_probes_leave_no_trace(spans: InMemorySpanExporter) -> None:
    from grpc_health.v1.health_pb2 import HealthCheckRequest

    async with running() as server:
        with capture_logs() as lines:
            await server.health.Check(HealthCheckRequest())
            await failure_of(server.health.Check(HealthCheckRequest(service="nope")))
    assert spans.get_finished_spans() == ()
    assert [line for line in lines if "method" in line] == []
    labels = {"grpc_service": "grpc.health.v1.Health", "grpc_method": "Check", "grpc_code": "OK"}
    assert REGISTRY.get_sample_value("grpc_server_handled_total", labels) is None


def number_of_series() -> int:
    """Of all metrics that depend on what callers do."""
    return sum(len(family.samples) for family in REGISTRY.collect() if "grpc" in family.name)
