"""One service as a process: answer health checks, load, reach the store, serve, drain; knows no service."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc.aio
import structlog

from shared import telemetry
from shared.checkpoint import CheckpointError
from shared.errors import LenspairError, StoreUnavailable
from shared.rpc.server import RpcServer
from shared.settings import SharedSettings
from shared.store.redis_url import InvalidStoreUrl
from shared.store.store import FeatureStore

_PING_AGAIN_SECONDS = 1.0
# What an operator can mend when loading raises it.
_MENDABLE = (CheckpointError, LenspairError, InvalidStoreUrl, OSError)

_log = structlog.get_logger("lenspair.process")


class _CannotStartError(Exception):
    """Loading failed for a reason that an operator can mend; the message says it all."""


class Service(Protocol):
    """A service with its model loaded and run once, ready for its servicer's calls."""

    @property
    def store(self) -> FeatureStore:
        """What must answer before anybody is served."""

    async def run(self) -> None:
        """The background loop; when it ends with an error, so does the process."""

    async def close(self) -> None:
        """Gives everything back, after the last call has ended."""


def run_process(
    settings: SharedSettings,
    service_name: str,
    register: Callable[[grpc.aio.Server], None],
    build: Callable[[], Service],
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status of the process.

    Health checks are answered from the start, with NOT_SERVING until `build` (called on another thread)
    has returned and the store has answered; calls of the servicer that `register` adds are refused until
    then.
    """
    try:
        observers = telemetry.set_up(settings, service_name)
    except OSError as error:
        _log.error("the process can't start", cause=f"metrics port {settings.metrics_port}: {error}")
        return 1
    status = 0
    try:
        asyncio.run(_serve(settings, service_name, register, build))
    except* _CannotStartError as problems:
        for problem in problems.exceptions:
            _log.error("the process can't start", cause=str(problem))
        status = 1
    except* Exception:  # noqa: BLE001  whatever ends the process is logged in the form of its other lines
        _log.exception("the process ends")
        status = 1
    finally:
        observers.shutdown()
    return status


async def _serve(
    settings: SharedSettings,
    service_name: str,
    register: Callable[[grpc.aio.Server], None],
    build: Callable[[], Service],
) -> None:
    """Heeds signals from the first moment on; ends with an error when the work does."""
    server = RpcServer(settings, [service_name])
    server.add(register)
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_work(server, build))
        await server.run_until_signal()
        work.cancel()


async def _work(server: RpcServer, build: Callable[[], Service]) -> None:
    """Loads the model, opens the doors, and runs the background loop until cancelled."""
    try:
        await server.start()
        service = await asyncio.to_thread(build)
    except _MENDABLE as error:
        raise _CannotStartError(str(error)) from error
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.run())
            await _reach(service.store)
            await server.set_serving()
    finally:
        await service.close()


async def _reach(store: FeatureStore) -> None:
    """Waits for the store: health says NOT_SERVING until then."""
    while True:
        try:
            return await store.ping()
        except StoreUnavailable as error:
            _log.warning("the store does not answer; trying again", cause=error.message)
            await asyncio.sleep(_PING_AGAIN_SECONDS)
