"""A process with telemetry, as `__main__` sets it up: makes a span, reads its own metrics, ends.

python -m tests.rpc.telemetry_process OTLP_ENDPOINT METRICS_PORT
"""

import sys
import time
import urllib.request

from opentelemetry import trace
from prometheus_client import Counter

from shared import telemetry
from tests.rpc.servers import settings


def main(endpoint: str, port: str) -> None:
    observers = telemetry.set_up(settings(otlp_endpoint=endpoint, metrics_port=int(port)), "lenspair-test")
    Counter("lenspair_test", "A counter.").inc()
    url = f"http://127.0.0.1:{observers.metrics_port}/metrics"
    with (
        trace.get_tracer("test").start_as_current_span("a span"),
        urllib.request.urlopen(url, timeout=5) as page,
    ):
        sys.stdout.write(page.read().decode())
    started = time.monotonic()
    observers.shutdown()
    sys.stdout.write(f"shutdown took {time.monotonic() - started:.2f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
