"""The embedded server starts, says why it does not, and never outlives the process that started it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from demo.embedded_store import EmbeddedStore, EmbeddedStoreError
from tests.contract.backends import RedisBackend

PARENT = """
import time
from demo.embedded_store import EmbeddedStore
print(EmbeddedStore.start().pid, flush=True)
time.sleep(60)
"""


async def test_it_answers_at_its_url() -> None:
    with EmbeddedStore.start() as server:
        store = RedisBackend(server.url).open()
        await store.ping()
        await store.close()


def test_it_is_gone_after_stop() -> None:
    server = EmbeddedStore.start()
    socket = Path(server.url.removeprefix("unix://"))
    assert socket.exists()
    server.stop()
    server.stop()
    assert not socket.parent.exists()
    assert not psutil.pid_exists(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": directory},
        ) as parent,
    ):
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)


def test_a_server_that_can_not_start_says_why() -> None:
    with pytest.raises(EmbeddedStoreError, match="did not start"):
        EmbeddedStore.start(options={"maxmemory": "much"})
