"""Faults of a store under Sentinel: a planned switch to the replica, and a master that dies."""

import os
import signal

from bench.fault_kinds import Fault
from demo.pair import Pair
from demo.sentinel_store import SentinelStore

SWITCHED, FAILED_OVER = "store-switched", "store-failed-over"
NAMES = (SWITCHED, FAILED_OVER)


def faults(servers: SentinelStore) -> tuple[Fault, ...]:
    """In the order in which they must happen: nobody follows the second master."""

    def switch_over(_: Pair) -> None:
        servers.switch_over()

    def kill_master(_: Pair) -> None:
        before = servers.master_port
        os.kill(servers.master.pid, signal.SIGKILL)
        servers.wait_for_new_master(before)

    return Fault(SWITCHED, switch_over), Fault(FAILED_OVER, kill_master)
