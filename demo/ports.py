"""Ports for processes that must know their own, or their neighbours', before they start."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Different ports on 127.0.0.1 that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
