"""Generated checkpoints and the reference on them, made once."""

from collections.abc import Iterator

import pytest
import torch

from bench.generated_checkpoint import KINDS, write_generated_checkpoint
from tests.unit.engine.reference import Reference


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are quickest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=KINDS)
def any_reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One of each kind of checkpoint."""
    kind = request.param
    path = write_generated_checkpoint(tmp_path_factory.mktemp(kind), kind)
    return Reference(path, "qwen3_vl_moe" if kind.startswith("moe") else "qwen3_vl")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The dense checkpoint."""
    return Reference(write_generated_checkpoint(tmp_path_factory.mktemp("dense"), "dense"), "qwen3_vl")
