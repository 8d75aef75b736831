"""Each service holds its own half of the weights and not the other one."""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.generated_checkpoint import write_generated_checkpoint
from demo.pair import Pair

# What each service has imported once it serves.
IMPORTS = {
    "encoder": "import encoder_service.app",
    "decoder": "import decoder_service.app",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generated_checkpoint(tmp_path_factory.mktemp("big"), "untied", size="big")


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Pair]:
    with Pair(checkpoint, environment={"LENSPAIR_DTYPE": "float32"}) as running:
        yield running


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_resident_memory_is_one_half(checkpoint: Path, pair: Pair, name: str) -> None:
    half = _half_bytes(checkpoint)[name]
    assert half > 200e6
    held = _resident(getattr(pair, name).pid) - _idle_resident(IMPORTS[name])
    print(f"\n{name}: half {half / 1e6:.0f} MB, held {held / 1e6:.0f} MB, ratio {held / half:.3f}")
    assert 0.85 <= held / half <= 1.15


def _resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _idle_resident(imports: str) -> int:
    """The memory of a process that has imported the same and does nothing."""
    code = f"{imports}; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"ready"
        time.sleep(0.5)
        resident = _resident(process.pid)
        process.communicate(b"\n")
    return resident


def _half_bytes(checkpoint: Path) -> dict[str, int]:
    """Bytes of the weights of each half, from the headers of the safetensors files."""
    sizes = {"encoder": 0, "decoder": 0}
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                sizes["encoder" if "visual." in name else "decoder"] += end - begin
    return sizes
