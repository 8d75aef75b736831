"""How a client calls: time, sizes, metadata, and what its channels do by themselves."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

ENCODER_SERVICE = "lenspair.encoder.v1.EncoderService"
DECODER_SERVICE = "lenspair.decoder.v1.DecoderService"

# Repeating these is harmless. Generate is not among them: it costs a whole answer, and a stream goes on
# at another decoder with what it has.
_REPEATED_METHODS = {
    ENCODER_SERVICE: ("Encode", "LookupFeatures", "KeepAlive", "Evict", "DescribeFeatures", "GetStoreStats")
}


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What holds for all calls of a client.

    `timeout_seconds` is the time of one call of a client's method, all its steps together, unless the call
    names its own; there is no endless call. `max_message_bytes` must equal the servers' setting: larger
    pictures are sent in chunks. `metadata` goes with every call, a tenant's name for instance.
    """

    timeout_seconds: float = 60.0
    max_message_bytes: int = 64 * 1024 * 1024
    metadata: tuple[tuple[str, str], ...] = ()
    keepalive_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_timeout(self.timeout_seconds)


def check_timeout(seconds: float) -> float:
    """The same number, if it is a time that ends."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"a timeout must be a finite number of seconds above 0, not {seconds}")
    return seconds


def service_config(service: str) -> str:
    """The gRPC service config of a channel: spread calls over healthy servers, repeat what is harmless."""
    config: dict[str, object] = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": service},
    }
    if service in _REPEATED_METHODS:
        names = [{"service": service, "method": method} for method in _REPEATED_METHODS[service]]
        config["methodConfig"] = [{"name": names, "retryPolicy": _retry_policy()}]
    return json.dumps(config)


def channel_options(service: str, options: ClientOptions) -> Sequence[tuple[str, str | int]]:
    """The options of a channel to one of the two services."""
    return [
        ("grpc.service_config", service_config(service)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # A call is repeated only while its message lies in this buffer, and pictures are large.
        ("grpc.per_rpc_retry_buffer_size", options.max_message_bytes),
        ("grpc.keepalive_time_ms", round(1000 * options.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that comes back is found within seconds.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
    ]


def _retry_policy() -> dict[str, object]:
    return {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
