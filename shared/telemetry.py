"""Logs, traces and metrics of a process: set up once, from `__main__`; knows no service."""

import logging
import sys
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

import prometheus_client
import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from shared.settings import SharedSettings

# Without a collector the exporter would keep a process for many seconds. The metrics end point takes up to
# half a second beside it.
_SHUTDOWN_SECONDS = 1.5


class Telemetry:
    """What must be closed again; use `set_up`."""

    def __init__(self, tracing: TracerProvider | None, metrics: WSGIServer | None) -> None:
        self._tracing = tracing
        self._metrics = metrics

    @property
    def metrics_port(self) -> int | None:
        """The port of the Prometheus end point; None when it is off."""
        return None if self._metrics is None else int(self._metrics.server_port)

    def shutdown(self) -> None:
        """Sends the last spans, for two seconds at the most, and closes the metrics end point."""
        sender = None
        if self._tracing is not None:
            sender = threading.Thread(target=self._tracing.shutdown, daemon=True)
            sender.start()
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()
        if sender is not None:
            sender.join(_SHUTDOWN_SECONDS)


def set_up(settings: SharedSettings, service_name: str) -> Telemetry:
    """Configures this process' logs, traces (with an OTLP end point only) and metrics (with a port only).

    Raises:
        OSError: the metrics port can't be bound.
    """
    set_up_logs(settings.log_format, settings.log_level)
    metrics = None
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    if settings.metrics_port:
        metrics, _ = prometheus_client.start_http_server(settings.metrics_port)
    tracing = None
    if settings.otlp_endpoint:
        tracing = _tracing_to(settings.otlp_endpoint, service_name)
        trace.set_tracer_provider(tracing)
    return Telemetry(tracing, metrics)


def set_up_logs(log_format: str, log_level: str) -> None:
    """Sends structlog's and the standard library's lines to standard error in one form."""
    shared: Sequence[structlog.types.Processor] = (
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_trace_ids,
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(log_format),
            ],
        )
    )
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def add_trace_ids(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: the ids of the current span, where there is one."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event


def _rendering(log_format: str) -> list[structlog.types.Processor]:
    if log_format == "console":
        # The plain form: the rich one prints local variables, payloads among them.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def _tracing_to(endpoint: str, service_name: str) -> TracerProvider:
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
