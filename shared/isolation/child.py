"""The inside of an isolated process: jobs come in, results or refusals go out; knows not what the jobs are.

A module that is to run isolated has a main function that calls `serve`. What goes wrong otherwise ends the
process: its parent sees that, and starts another one.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from shared.errors import InvalidRequest
from shared.isolation.frames import BrokenFrame, Kind, read_frame, write_frame

Handler = Callable[[bytearray], bytes | bytearray | memoryview]

MAX_JOB_BYTES = 1 << 31


def serve(open_handler: Callable[[bytearray], Handler]) -> None:
    """Makes a handler of the first frame, and answers jobs until the parent is gone.

    The arguments of the process are the memory that it may take beyond what it has when the handler is
    there, in bytes, and the processor time of one job, in seconds: both are limits of the system, so that
    they hold inside native code, and when the parent is gone.
    """
    max_bytes, max_seconds = map(int, sys.argv[1:])
    jobs, results = _own_pipes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _, setup = read_frame(jobs, max_bytes=MAX_JOB_BYTES)
        handler = open_handler(setup)
        del setup
        _limit_memory(max_bytes)
        write_frame(results, Kind.RESULT, b"")
        while True:
            _, job = read_frame(jobs, max_bytes=MAX_JOB_BYTES)
            _limit_seconds(max_seconds)
            write_frame(results, *_answer(handler, job))
    except BrokenFrame:
        return  # the parent is gone


def _own_pipes() -> tuple[int, int]:
    """Copies of stdin and stdout; what a library prints goes to stderr from now on, not between frames."""
    jobs, results = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return jobs, results


def _answer(handler: Handler, job: bytearray) -> tuple[Kind, bytes | bytearray | memoryview]:
    try:
        return Kind.RESULT, handler(job)
    except InvalidRequest as error:
        said = {
            "reason": error.reason,
            "message": error.message,
            "field": error.field,
            "metadata": error.metadata,
        }
        return Kind.REFUSAL, json.dumps(said).encode()


def _limit_memory(max_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + max_bytes, size + max_bytes))


def _limit_seconds(max_seconds: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = int(usage.ru_utime + usage.ru_stime) + max_seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
