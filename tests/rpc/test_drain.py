"""How a process ends: real processes, real signals (R08, R09, K05)."""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from tests.rpc.draining_process import CLEAN_UP_SECONDS
from tests.rpc.servers import Caller, eventually, failure_of
from tests.rpc.services import SERVICE

DRAINING = ("UNAVAILABLE", "DRAINING")
# Calls are told two seconds before the end of the grace.
TELL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running process and a caller of it."""

    process: Process
    caller: Caller
    marker: Path

    async def end(self) -> tuple[int, str]:
        """Its exit status and what it wrote to standard error."""
        async with asyncio.timeout(15):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def server_process(folder: Path, *, grace_seconds: float) -> AsyncIterator[ServerProcess]:
    port_file, marker = folder / "port", folder / "marker"
    arguments = ["-W", "error", "-m", "tests.rpc.draining_process", port_file, marker, str(grace_seconds)]
    process = await asyncio.create_subprocess_exec(sys.executable, *map(str, arguments), stderr=PIPE)
    try:
        await eventually(port_file.exists, seconds=20)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            yield ServerProcess(process, Caller(channel, address), marker)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def begun(server: ServerProcess, method: str) -> Any:
    """A stream whose first message is here."""
    call = server.caller.stream(method)
    assert (await call.read()).delta.text == "a"
    return call


async def test_sigterm_lets_calls_finish_and_tells_those_that_do_not(tmp_path: Path) -> None:
    """R09, R08, K05: exit 0, no traceback, clean-up done, watchers no hindrance."""
    async with server_process(tmp_path, grace_seconds=TELL_SECONDS + 0.6) as server:
        watch = server.caller.health.Watch(HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        finishing = await begun(server, "StreamThenFinish")
        endless = [await begun(server, "StreamForever"), await begun(server, "StreamThenHang")]
        server.process.send_signal(signal.SIGTERM)
        told = time.monotonic()

        assert (await finishing.read()).delta.text == "b"
        assert await finishing.read() is grpc.aio.EOF
        for call in endless:
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == DRAINING
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert (await failure_of(watch)).code == "UNAVAILABLE"
        code, errors = await server.end()
    assert code == 0
    assert "Traceback" not in errors
    assert server.marker.exists()
    assert time.monotonic() - told < TELL_SECONDS + 0.6 + 2 * CLEAN_UP_SECONDS


async def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    async with server_process(tmp_path, grace_seconds=30) as server:
        server.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            code, errors = await server.end()
    assert code == 0
    assert "Traceback" not in errors


async def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """K05."""
    async with server_process(tmp_path, grace_seconds=30) as server:
        watch = server.caller.health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        call = await begun(server, "StreamThenHang")
        server.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(3):
            code, _ = await server.end()
        assert (await failure_of(call)).code == "UNAVAILABLE"
    assert code == 128 + signal.SIGTERM


async def test_a_dead_background_loop_ends_the_process(tmp_path: Path) -> None:
    """Never a server that accepts calls and does not answer."""
    async with server_process(tmp_path, grace_seconds=30) as server:
        call = await begun(server, "StreamThenHang")
        await server.caller.unary("Answer")
        failure = await failure_of(call)
        code, errors = await server.end()
    assert (failure.code, failure.reason) == DRAINING
    assert code == 1
    assert "the background loop has died" in errors
    assert server.marker.exists()
