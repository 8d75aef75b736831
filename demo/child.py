"""Child processes that never outlive their parent, not even one that is killed; knows not what they run."""

import os
import subprocess
import sys
from collections.abc import Sequence

# Runs in the child before the command does: asks Linux for a SIGKILL when the parent is gone (option 1 is
# PR_SET_PDEATHSIG), ends if it is gone already, and becomes the command. Safer than `preexec_fn`, which
# runs Python between fork and exec of a process that may have threads.
_BECOME = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


def bound_to_parent(command: Sequence[str]) -> list[str]:
    """The command, as one that ends with this process; on other systems than Linux as it is.

    Start it from a thread that lives as long as the child is needed (the main thread): Linux counts the
    end of the starting thread as the end of the parent.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]


def stop_child(process: subprocess.Popen[bytes], *, grace_seconds: float) -> int:
    """SIGTERM, then SIGKILL after the grace; returns the exit status."""
    process.terminate()
    try:
        return process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
