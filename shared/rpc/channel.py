"""Opens channels from one service to another: the one place for what they all have, credentials included."""

import grpc.aio

from shared.features.source import Address

# Manifests and pieces have 1 MiB at the most; nothing larger is taken from a peer.
MAX_RECEIVED_BYTES = 2 * 1024 * 1024
_IDLE_SECONDS = 60.0

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.client_idle_timeout_ms", round(1000 * _IDLE_SECONDS)),
    # A peer that comes back is found within seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def open_channel(address: Address) -> grpc.aio.Channel:
    """A channel to exactly this host and port; it connects at the first call."""
    return grpc.aio.insecure_channel(_target(address), options=_OPTIONS)


def _target(address: Address) -> str:
    """With its scheme, so that gRPC takes no host for the name of one."""
    if address.ip is None:
        return f"dns:///{address}"
    return f"ipv{address.ip.version}:{address}"
