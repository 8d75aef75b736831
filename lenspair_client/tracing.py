"""The caller's trace, handed on in a call's metadata where the caller's process uses OpenTelemetry."""

try:
    from opentelemetry import propagate
except ImportError:

    def trace_metadata() -> tuple[tuple[str, str], ...]:
        """Nothing: this process makes no traces."""
        return ()
else:

    def trace_metadata() -> tuple[tuple[str, str], ...]:
        """The current span's context as W3C `traceparent` (and what else the process propagates)."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return tuple(carrier.items())
