"""Spans to a collector, metrics over HTTP, and an end that no collector can delay."""

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from demo.ports import free_port


@dataclass
class Collector(TraceServiceServicer):
    """Keeps what it is sent."""

    port: int = 0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    def Export(  # noqa: N802  the contract's name
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        self.requests.append(request)
        return ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer
    server.stop(None).wait()


def output_of_process(endpoint: str) -> str:
    command = [sys.executable, "-W", "error", "-m", "tests.rpc.telemetry_process", endpoint, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spans_reach_the_collector_under_the_services_name(collector: Collector) -> None:
    output_of_process(f"http://127.0.0.1:{collector.port}")
    (resource_spans,) = [spans for request in collector.requests for spans in request.resource_spans]
    attributes = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert attributes["service.name"] == "lenspair-test"
    assert [span.name for scope in resource_spans.scope_spans for span in scope.spans] == ["a span"]


def test_metrics_are_served_without_creation_times() -> None:
    output = output_of_process("")
    assert "lenspair_test_total 1.0" in output
    assert "lenspair_test_created" not in output


def test_a_collector_that_is_not_there_delays_the_end_by_two_seconds_at_the_most() -> None:
    found = re.search(r"shutdown took ([\d.]+)", output_of_process("http://127.0.0.1:1"))
    assert found is not None
    assert float(found[1]) < 2.9
