"""Builds, serves and drains a gRPC server; knows no service but health and reflection."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.rpc.interceptors import CallInterceptor
from shared.settings import SharedSettings

# A client may ping this often, calls or none; the client library pings every 10 seconds.
MIN_PING_INTERVAL_SECONDS = 5.0
KEEPALIVE_SECONDS = 60.0
KEEPALIVE_TIMEOUT_SECONDS = 20.0

# Calls that outlive the drain are told so this long before gRPC would just cancel them.
_TELL_SECONDS = 2.0
# How long handlers may clean up once their calls have ended.
_CLEAN_UP_SECONDS = 10.0

_log = structlog.get_logger("lenspair.rpc")


class RpcServer:
    """One server of one process, from NOT_SERVING over SERVING to drained.

    It can start before its services exist: health answers NOT_SERVING for each of `service_names` and for
    "", all other calls are refused with UNAVAILABLE, until `set_serving`.
    """

    def __init__(
        self,
        settings: SharedSettings,
        service_names: Sequence[str],
        *,
        max_connection_age_seconds: float = 300.0,
        min_ping_interval_seconds: float = MIN_PING_INTERVAL_SECONDS,
    ) -> None:
        self._settings = settings
        self._service_names = tuple(service_names)
        self._interceptor = CallInterceptor(
            default_deadline_seconds=settings.default_deadline_seconds,
            max_deadline_seconds=settings.max_deadline_seconds,
            tenant_metadata=settings.tenant_metadata,
            require_tenant=settings.require_tenant,
        )
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=[
                *message_options(settings.max_message_bytes),
                *connection_options(min_ping_interval_seconds),
                *_age_options(max_connection_age_seconds, settings.max_deadline_seconds),
            ],
        )

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Adds a service; `register` calls the generated `add_…Servicer_to_server`. Before set_serving."""
        register(self._server)

    async def start(self) -> int:
        """Binds and answers health checks with NOT_SERVING; returns the port.

        The port is written to the settings' port file as well.

        Raises:
            OSError: the address can't be bound.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._settings.reflection:
            names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        port = self._bind(self._settings.listen)
        await self._server.start()
        if self._settings.port_file is not None:
            _write_whole(self._settings.port_file, f"{port}\n")
        _log.info("listening", address=self._settings.listen, port=port)
        return port

    async def set_serving(self) -> None:
        """From now on calls are served; only after the model answers and the store was reached."""
        self._interceptor.is_ready = True
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        _log.info("serving", services=self._service_names)

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once.

        Cancelling it (a background task has died) ends open calls with UNAVAILABLE, without notice.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, stop, number)
        try:
            await stop.wait()
        except asyncio.CancelledError:
            await self.drain(notice_seconds=0, grace_seconds=0)
            raise
        await self.drain(
            notice_seconds=self._settings.drain_notice_seconds,
            grace_seconds=self._settings.drain_grace_seconds,
        )

    async def drain(self, *, notice_seconds: float, grace_seconds: float) -> None:
        """NOT_SERVING, a wait for end points to notice, no new calls, and an end for the open ones.

        Returns when every handler has ended, its clean-up included; then engines and stores may close.
        """
        _log.info("draining", notice_seconds=notice_seconds, grace_seconds=grace_seconds)
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(notice_seconds)
        # Health watchers never leave by themselves.
        self._interceptor.calls.end(quiet_only=True)
        stopping = asyncio.create_task(self._server.stop(max(grace_seconds, _TELL_SECONDS)))
        await asyncio.wait({stopping}, timeout=max(0.0, grace_seconds - _TELL_SECONDS))
        self._interceptor.calls.end()
        await stopping
        if not await self._interceptor.calls.ended(within_seconds=_CLEAN_UP_SECONDS):
            _log.warning("handlers still clean up; going on without them")
        _log.info("drained")

    async def _set_health(self, status: int) -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    def _bind(self, address: str) -> int:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"can't listen on {address}: {error}") from None
        return port


def message_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """The largest message, both ways; a server and its clients must agree on it."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def connection_options(min_ping_interval_seconds: float) -> list[tuple[str, int]]:
    """Keepalive. gRPC ignores a name that it does not know in silence; a test pings to see that these act.

    The port is never shared: two servers on one port would each get some of the calls.
    """
    return [
        ("grpc.keepalive_time_ms", round(1000 * KEEPALIVE_SECONDS)),
        ("grpc.keepalive_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_SECONDS)),
        ("grpc.http2.ping_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * min_ping_interval_seconds)),
        ("grpc.so_reuseport", 0),
    ]


def _age_options(age_seconds: float, grace_seconds: float) -> list[tuple[str, int]]:
    """Connections end after a while, so that clients look names up again and find new pods."""
    return [
        ("grpc.max_connection_age_ms", round(1000 * age_seconds)),
        ("grpc.max_connection_age_grace_ms", round(1000 * grace_seconds)),
    ]


def _on_signal(stop: asyncio.Event, number: int) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


def _write_whole(path: Path, text: str) -> None:
    """A reader finds the whole text or no file."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
