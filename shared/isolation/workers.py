"""Processes for work on bytes that nobody trusts: they may crash, hang or grow, and this process goes on.

Each process has one job at a time, so whatever happens to it is that job's alone. A process that did not
answer properly is killed and replaced. Nothing that comes back is more than bytes.
"""

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import structlog

from shared.errors import InvalidMedia, InvalidMediaSettings, InvalidRequest, MediaTooLarge
from shared.isolation.frames import BrokenFrame, Kind, read_frame, write_frame

START_SECONDS = 60
ABANDONED_SECONDS = 1.0
MAX_REFUSAL_BYTES = 64 * 1024

# What a process needs to find Python and its packages; no secret of the service's environment goes along.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_REFUSALS = {
    error.reason: error for error in (InvalidRequest, InvalidMedia, MediaTooLarge, InvalidMediaSettings)
}

_log = structlog.get_logger(__name__)


class WorkerLost(Exception):
    """The process crashed on the job, or took too long or too much for it; it has been replaced."""


class IsolatedWorkers:
    """`num_processes` processes that run `module`, which serves as child.py says.

    Every process gets `setup` first. A job may take `timeout_seconds`, and `max_bytes` of memory beyond what
    the process has when it is set up; its result may have `max_result_bytes`. Close it in the end.
    """

    def __init__(
        self,
        module: str,
        setup: bytes = b"",
        *,
        num_processes: int,
        max_bytes: int,
        max_result_bytes: int,
        timeout_seconds: int,
    ) -> None:
        self._command = [sys.executable, "-m", module, str(max_bytes), str(timeout_seconds)]
        self._setup = setup
        self._max_result_bytes = max_result_bytes
        self._timeout_seconds = timeout_seconds
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._all: set[_Process] = set()
        self._is_closed = False
        # Two threads each: the one of a process that was given up ends when its pipe does.
        self._threads = ThreadPoolExecutor(2 * num_processes, thread_name_prefix="isolated-work")
        for _ in range(num_processes):
            self._start()

    @property
    def process_ids(self) -> list[int]:
        return sorted(process.popen.pid for process in self._all)

    async def run(self, job: bytes | bytearray | memoryview) -> bytearray:
        """The result of one job; waits for its turn, and then no longer than the job may take.

        Raises:
            InvalidRequest: or one of its kin, as the process refused the job.
            WorkerLost: it crashed, took too long or too much.
        """
        process = await self._living()
        running = asyncio.create_task(self._serve(process, job))
        running.add_done_callback(_seen)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A job is mostly over soon, and a new process takes longer than that.
            asyncio.get_running_loop().call_later(ABANDONED_SECONDS, _end, running, process)
            raise

    def close(self) -> None:
        """Kills them all; jobs that run raise WorkerLost. Any thread may call it."""
        self._is_closed = True
        for process in list(self._all):
            process.kill()
        self._all.clear()
        self._threads.shutdown(wait=False)

    async def _serve(self, process: "_Process", job: bytes | bytearray | memoryview) -> bytearray:
        """Runs the job, and gives the process back or replaces it, whether anybody still waits or not."""
        try:
            if not process.is_set_up:
                await self._exchange(process, self._setup, START_SECONDS)
                process.is_set_up = True
            kind, answer = await self._exchange(process, job, self._timeout_seconds)
            refusal = None if kind is Kind.RESULT else _refusal(answer)
        except (BrokenFrame, TimeoutError) as error:
            self._replace(process)
            _log.warning(
                "an isolated process was lost", module=self._command[2], why=str(error) or "too slow"
            )
            raise WorkerLost(str(error) or "too slow") from None
        except BaseException:  # cut short: what comes out of this process is nobody's any more
            self._replace(process)
            raise
        self._idle.put_nowait(process)
        if refusal is not None:
            raise refusal
        return answer

    async def _living(self) -> "_Process":
        """One that died while it had nothing to do is no fault of the next job."""
        process = await self._idle.get()
        while process.popen.poll() is not None and not self._is_closed:
            self._replace(process)
            process = await self._idle.get()
        return process

    async def _exchange(
        self, process: "_Process", payload: bytes | bytearray | memoryview, timeout_seconds: float
    ) -> tuple[Kind, bytearray]:
        exchange = partial(process.exchange, payload, self._max_result_bytes)
        running = asyncio.get_running_loop().run_in_executor(self._threads, exchange)
        return await asyncio.wait_for(running, timeout_seconds)

    def _start(self) -> None:
        process = _Process(self._command)
        self._all.add(process)
        self._idle.put_nowait(process)

    def _replace(self, process: "_Process") -> None:
        process.kill()
        if not self._is_closed:
            self._all.remove(process)
            self._start()


class _Process:
    """One child. `exchange` blocks until it is done or `kill` ends it."""

    def __init__(self, command: list[str]) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self.popen = subprocess.Popen(  # noqa: S603 - Python and a module of ours
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            process_group=0,  # an interrupt from the terminal is for us: this one ends when its pipe does
        )
        self.is_set_up = False
        self._exchanging = Lock()

    def exchange(self, payload: bytes | bytearray | memoryview, most: int) -> tuple[Kind, bytearray]:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with self._exchanging:
            if self.popen.stdin.closed:
                raise BrokenFrame("the process was ended")
            write_frame(self.popen.stdin.fileno(), Kind.JOB, payload)
            return read_frame(self.popen.stdout.fileno(), max_bytes=max(most, MAX_REFUSAL_BYTES))

    def kill(self) -> None:
        self.popen.kill()
        with self._exchanging, self.popen:  # an exchange ends at once; the pipes are closed behind it
            pass


def _seen(running: "asyncio.Task[bytearray]") -> None:
    """Nobody may be left who asks how it ended."""
    if not running.cancelled():
        running.exception()


def _end(running: "asyncio.Task[bytearray]", process: "_Process") -> None:
    if not running.done():
        process.kill()


def _refusal(answer: bytearray) -> InvalidRequest:
    """The error that the process told of. Raises BrokenFrame when that is none."""
    try:
        said = json.loads(answer)
        return _REFUSALS[said["reason"]](
            str(said["message"]),
            field=str(said["field"]),
            **{str(name): str(value) for name, value in said["metadata"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BrokenFrame("a refusal that can't be read") from None
