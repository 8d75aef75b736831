"""How a service as a process ends by itself, and what an operator reads then."""

import socket
import subprocess
import sys


def end_of(kind: str, metrics_port: int = 0) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.rpc.ending_process", kind, str(metrics_port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


def test_what_an_operator_can_mend_is_one_line() -> None:
    status, log = end_of("load")
    assert status == 1
    assert "there is no such checkpoint" in log
    assert "Traceback" not in log


def test_a_metrics_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, log = end_of("load", port)
    assert status == 1
    assert f"metrics port {port}" in log
    assert "Traceback" not in log


def test_a_loop_that_dies_leaves_its_traceback() -> None:
    status, log = end_of("loop")
    assert status == 1
    assert "the process ends" in log
    assert "can't start" not in log
    assert "the loop has died" in log
    assert "Traceback" in log
