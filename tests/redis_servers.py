"""The real servers that store tests run against."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from demo.embedded_store import EmbeddedStore

SERVER_KINDS = ("valkey", "redis")


def start_server(
    kind: str, options: Mapping[str, str] | None = None, *, port: int | None = None
) -> EmbeddedStore:
    """Starts the embedded server ("valkey") or Debian's ("redis"); the caller stops it.

    Skips the test where Debian's is not installed; in CI it must be.
    """
    if kind == "valkey":
        return EmbeddedStore.start(options=options, port=port)
    program = shutil.which("redis-server")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed, and CI must test against it")
        pytest.skip("redis-server is not installed")
    return EmbeddedStore.start(server=Path(program), options=options, port=port)
