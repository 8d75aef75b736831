"""How a client calls: time, sizes, metadata, and what its channels do by themselves."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

ENCODER_SERVICE = "lenspair.encoder.v1.EncoderService"
DECODER_SERVICE = "lenspair.decoder.v1.DecoderService"

# About 30 years; far above it, gRPC takes a time for one that has passed.
_MOST_SECONDS = 1e9
_METADATA_NAME = re.compile(r"[a-z0-9_.-]+")

# How long a ping or a new connection may go unanswered.
_ANSWER_MS = 5_000


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What holds for all calls of a client.

    `timeout_seconds` is the time of one call of a client's method, all its steps together, unless the call
    names its own; there is no endless call. While it lasts, what fails because a server or the store is
    gone or full is tried again, with growing waits. `patience_seconds` ends that earlier: it is how long
    a step may go on failing (0: not tried again; None: as long as there is time).

    `max_message_bytes` must equal the servers' setting: larger pictures are sent in chunks. `metadata` goes
    with every call, a tenant's name for instance. A server that hangs is noticed 5 seconds after a ping;
    one is sent when a connection was silent for `keepalive_seconds`. Servers may refuse more frequent
    ones than these.

    `allow_hand_over`: where the store fails, an encoder may keep features and name itself as their source.
    """

    timeout_seconds: float = 60.0
    max_message_bytes: int = 64 * 1024 * 1024
    metadata: tuple[tuple[str, str], ...] = ()
    keepalive_seconds: float = 10.0
    patience_seconds: float | None = None
    allow_hand_over: bool = True

    def __post_init__(self) -> None:
        check_timeout(self.timeout_seconds)
        for name, value in self.metadata:
            _check_metadata(name, value)
        if self.patience_seconds is not None and not self.patience_seconds >= 0:
            raise ValueError(f"patience must be a number of seconds from 0, not {self.patience_seconds}")


def check_timeout(seconds: float) -> float:
    """The same number, if it is a time that ends."""
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"a timeout must be a finite number of seconds above 0, not {seconds}")
    return seconds


def _check_metadata(name: str, value: str) -> None:
    is_text = value.isascii() and value.isprintable()
    if not (_METADATA_NAME.fullmatch(name) and is_text) or name.endswith("-bin"):
        raise ValueError(f"metadata needs a name in lower case and a value in printable ASCII, not {name!r}")


def service_config(service: str) -> str:
    """The gRPC service config of a channel: calls are spread over healthy servers. Failed ones are made
    again by persistence.py alone, which sees them all, counts them, and knows when to stop."""
    return json.dumps(
        {
            "loadBalancingConfig": [{"round_robin": {}}],
            "healthCheckConfig": {"serviceName": service},
        }
    )


def channel_options(service: str, options: ClientOptions) -> Sequence[tuple[str, str | int]]:
    """The options of a channel to one of the two services."""
    return [
        ("grpc.service_config", service_config(service)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # A server that hangs (stopped, cut off) answers no ping: its open calls then fail together and are
        # made again elsewhere. One that only takes long answers, however busy it is.
        ("grpc.keepalive_time_ms", round(1000 * options.keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", _ANSWER_MS),
        ("grpc.http2.ping_timeout_ms", _ANSWER_MS),  # by default a minute, whatever the other one says
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A new connection to a hanging server is given up; a server that comes back is found soon.
        ("grpc.min_reconnect_backoff_ms", _ANSWER_MS),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_http_proxy", 0),
    ]
