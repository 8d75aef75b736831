"""Runs the whole pair on this machine: a store, encoders and decoders, as processes that end with us."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.child import bound_to_parent, stop_child
from demo.embedded_store import EmbeddedStore
from demo.ports import free_port

DEMO_CHECKPOINT = Path(__file__).parent / "checkpoint"
START_SECONDS = 180.0
STOP_SECONDS = 40.0

# Each service ignores what is the other's.
_HAND_OVER = {"LENSPAIR_ALLOWED_SOURCES": "127.0.0.0/8"}


class PairError(Exception):
    """A process of the pair did not start, or ended; the message holds the end of its log."""


class ServiceProcess:
    """One service as a process; a restarted one listens on the port that it had.

    `number` tells several of one `service` apart.
    """

    def __init__(
        self, service: str, environment: Mapping[str, str], folder: Path, port: int = 0, *, number: int = 1
    ) -> None:
        self.name = service if number == 1 else f"{service}-{number}"
        self.log = folder / f"{self.name}.log"
        self.port = port
        self._service = service
        self._environment = dict(environment)
        self._port_file = folder / f"{self.name}.port"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the process and returns at once."""
        self._port_file.unlink(missing_ok=True)
        listen = {"LENSPAIR_LISTEN": self.address, "LENSPAIR_PORT_FILE": str(self._port_file)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own program
                bound_to_parent([sys.executable, "-m", f"{self._service}_service"]),
                env={**self._environment, **listen},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Returns when the health service says SERVING.

        Raises:
            PairError: the process ended, or is not ready in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_running():
                raise PairError(f"the {self.name} ended at its start:\n{self.log_end()}")
            if self._is_serving():
                return
            time.sleep(0.05)
        raise PairError(f"the {self.name} was not ready in {seconds:.0f} s:\n{self.log_end()}")

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Starts an ended process again, on the same port, and returns when it is ready."""
        assert self._process is not None
        self._process.wait()
        self.start()
        self.wait_ready()

    def send(self, number: signal.Signals) -> None:
        """Sends the process a signal; harmless when it has ended."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM and a wait for the drain; returns the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGCONT)  # a stopped process would not hear it
        return stop_child(self._process, grace_seconds=STOP_SECONDS)

    def log_end(self, lines: int = 30) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _is_serving(self) -> bool:
        if not self._port_file.exists():
            return False
        text = self._port_file.read_text().strip()
        if not text:
            return False
        self.port = int(text)
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Pair:
    """A store, encoders and decoders on one checkpoint. A context manager: leaving it stops them all.

    The store is the one that `store_url` or else `LENSPAIR_STORE_URL` names, else an embedded server. The
    processor cores are divided between the services. `environment` adds settings for all of them, and
    `decoder_environment` for decoders alone. With a `store_port` the embedded store can be restarted.
    `encoder` and `decoder` are the first of each; ports can be set for these only. With `hand_over` encoders
    keep what the store does not take, and decoders may fetch it from there.
    """

    def __init__(
        self,
        checkpoint: Path | str = DEMO_CHECKPOINT,
        *,
        environment: Mapping[str, str] | None = None,
        decoder_environment: Mapping[str, str] | None = None,
        encoder_port: int = 0,
        decoder_port: int = 0,
        store_port: int | None = None,
        store_url: str = "",
        num_encoders: int = 1,
        num_decoders: int = 1,
        hand_over: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lenspair-")
        folder = Path(self._folder.name)
        self.store: EmbeddedStore | None = None
        self.store_url = store_url or os.environ.get("LENSPAIR_STORE_URL", "")
        self._store_port = store_port
        self._checkpoint = str(checkpoint)
        self._environment = dict(environment or {})
        self._own_environments = {"decoder": dict(decoder_environment or {})}
        self._hand_over = hand_over
        if hand_over:
            self._environment = _HAND_OVER | {"LENSPAIR_STORE_KEY": secrets.token_hex(32)} | self._environment
        self._ports = {"encoder": encoder_port, "decoder": decoder_port}
        self._counts = {"encoder": num_encoders, "decoder": num_decoders}
        self.encoders: list[ServiceProcess] = []
        self.decoders: list[ServiceProcess] = []
        self.folder = folder

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def encoder(self) -> ServiceProcess:
        return self.encoders[0]

    @property
    def decoder(self) -> ServiceProcess:
        return self.decoders[0]

    @property
    def encoder_target(self) -> str:
        """What a client connects to, to reach all encoders."""
        return _target(self.encoders)

    @property
    def decoder_target(self) -> str:
        """What a client connects to, to reach all decoders."""
        return _target(self.decoders)

    def close(self) -> None:
        for service in [*self.encoders, *self.decoders]:
            service.stop()
        if self.store is not None:
            self.store.stop()
        self._folder.cleanup()

    def restart_store(self) -> None:
        """Ends the embedded store and starts an empty one on the same port."""
        assert self.store is not None
        assert self._store_port is not None
        self.store.stop()
        self.store = EmbeddedStore.start(port=self._store_port)

    def _start(self) -> None:
        if not self.store_url:
            self.store = EmbeddedStore.start(port=self._store_port)
            self.store_url = self.store.url
        self.encoders = self._make("encoder")
        self.decoders = self._make("decoder")
        for service in [*self.encoders, *self.decoders]:
            service.start()
        for service in [*self.encoders, *self.decoders]:
            service.wait_ready()

    def _make(self, service: str) -> list[ServiceProcess]:
        ports = [self._ports[service], *(0 for _ in range(1, self._counts[service]))]
        return [self._make_one(service, number, port) for number, port in enumerate(ports, 1)]

    def _make_one(self, service: str, number: int, port: int) -> ServiceProcess:
        environment = self._service_environment() | self._own_environments.get(service, {})
        if self._hand_over and service == "encoder":
            port = port or free_port()
            environment["LENSPAIR_ADVERTISED_ADDRESS"] = f"127.0.0.1:{port}"
        return ServiceProcess(service, environment, self.folder, port, number=number)

    def _service_environment(self) -> dict[str, str]:
        threads = max(1, (os.cpu_count() or 1) // sum(self._counts.values()))
        return {
            **os.environ,
            "LENSPAIR_TORCH_THREADS": str(threads),
            "LENSPAIR_CHECKPOINT": self._checkpoint,
            "LENSPAIR_STORE_URL": self.store_url,
            **self._environment,
        }


def _target(services: Sequence[ServiceProcess]) -> str:
    return "ipv4:" + ",".join(service.address for service in services)
