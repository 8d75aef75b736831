"""An isolated process for tests: it does what its job says, also the worst."""

import os
import signal
import time
from collections.abc import Callable

from shared.errors import MediaTooLarge
from shared.isolation.child import Handler, serve


def _print() -> bytes:
    os.write(1, b"noise")
    print("more noise", flush=True)
    return b"printed"


def _crash() -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("still here")


def _fail() -> bytes:
    raise RuntimeError("a secret")


def _refuse() -> bytes:
    raise MediaTooLarge("too many frames", field="media", limit="7")


def _sleep(seconds: bytes) -> bytes:
    time.sleep(float(seconds))
    return b"slept"


def _spin() -> bytes:
    while True:
        pass


DEEDS: dict[bytes, Callable[..., bytes]] = {
    b"print": _print,
    b"pid": lambda: str(os.getpid()).encode(),
    b"environment": lambda: "\n".join(os.environ).encode(),
    b"crash": _crash,
    b"raise": _fail,
    b"refuse": _refuse,
    b"sleep": _sleep,
    b"spin": _spin,
    b"grow": lambda size: str(len(bytearray(int(size)))).encode(),
    b"answer": lambda size: bytes(int(size)),
}


def _open(setup: bytearray) -> Handler:
    deeds: dict[bytes, Callable[..., bytes]] = {**DEEDS, b"echo": lambda text: bytes(setup) + text}

    def handle(job: bytearray) -> bytes:
        name, *arguments = bytes(job).split(b" ")
        return deeds[name](*arguments)

    return handle


if __name__ == "__main__":
    serve(_open)
