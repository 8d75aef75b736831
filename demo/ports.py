"""Finds a free port for a server that must know its own before it starts."""

import socket


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
