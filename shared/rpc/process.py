"""One service as a process: load it, reach the store, serve, drain; knows no service."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import grpc.aio
import structlog

from shared import telemetry
from shared.checkpoint import CheckpointError
from shared.errors import StoreUnavailable
from shared.rpc.server import RpcServer
from shared.settings import SharedSettings
from shared.store.store import FeatureStore

_PING_AGAIN_SECONDS = 1.0


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
    name: str,
    service_name: str,
    register: Callable[[grpc.aio.Server], None],
    build: Callable[[], Service],
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status of the process.

    Health checks are answered from the start, with NOT_SERVING until `build` (called on another thread)
    has returned and the store has answered; calls of the servicer that `register` adds are refused until
    then. `name` is that of logs and traces.
    """
    observers = telemetry.set_up(settings, name)
    log = structlog.get_logger(name)
    try:
        server_of = partial(RpcServer, settings, [service_name])
        asyncio.run(_serve(server_of, register, build, log))
    except CheckpointError as error:
        log.error("the checkpoint can't be served", cause=str(error))  # noqa: TRY400  the text says it all
        return 1
    except Exception:
        log.exception("the process ends")
        return 1
    finally:
        observers.shutdown()
    return 0


async def _serve(
    server_of: Callable[[], RpcServer],
    register: Callable[[grpc.aio.Server], None],
    build: Callable[[], Service],
    log: Any,
) -> None:
    server = server_of()
    server.add(register)
    await server.start()
    try:
        service = await asyncio.to_thread(build)
    except BaseException:
        await server.drain(notice_seconds=0, grace_seconds=0)
        raise
    try:
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(service.run())
            await _reach(service.store, log)
            await server.set_serving()
            await server.run_until_signal()
            loop.cancel()
    finally:
        await service.close()


async def _reach(store: FeatureStore, log: Any) -> None:
    while True:
        try:
            return await store.ping()
        except StoreUnavailable as error:
            log.warning("the store does not answer; trying again", cause=error.message)
            await asyncio.sleep(_PING_AGAIN_SECONDS)
