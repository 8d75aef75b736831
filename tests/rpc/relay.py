"""A connection that can go silent without being closed, as one to a hanging host does."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_READ_BYTES = 64 * 1024


class Relay:
    """Forwards 127.0.0.1:`port` to a server until it is frozen; then it takes all and gives nothing."""

    def __init__(self, listener: socket.socket, server_port: int) -> None:
        self.port: int = listener.getsockname()[1]
        self.is_frozen = threading.Event()
        self._listener = listener
        self._server_port = server_port
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_READ_BYTES):
                if not self.is_frozen.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(server_port: int) -> Iterator[Relay]:
    """A relay in front of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener, server_port)
        try:
            yield relay
        finally:
            relay.close()
