"""Child processes that never outlive their parent, not even one that is killed; knows not what they run."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start_child(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Starts `command` with its output appended to `log`. Call it from a thread that stays: on Linux the
    kernel kills the child when that thread ends."""
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - commands are our own
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )


def stop_child(process: subprocess.Popen[bytes], *, grace_seconds: float) -> int:
    """SIGTERM, then SIGKILL after the grace; returns the exit status."""
    process.terminate()
    try:
        return process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# Loaded before any fork: between fork and exec a child must not import or lock anything.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
