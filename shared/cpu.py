"""How many processor cores this process may use, and how its threads wait for each other."""

import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def let_threads_sleep() -> None:
    """Sets how OpenMP's threads wait, where the environment does not say; call it before torch is imported.

    Threads that spin without end slow two torch processes on the same cores down manifold; threads that
    sleep at once have to be woken for each of the hundreds of products of a step. So they spin for a moment,
    a fraction of a millisecond, and then sleep.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")


def available_cores(cpu_max: Path = _CPU_MAX) -> int:
    """The container's CPU quota in whole cores, but no more than the cores that we may run on."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
