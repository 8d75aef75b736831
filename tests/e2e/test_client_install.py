"""The base package in an empty environment: what internal callers install, and nothing of the services."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

BASE = ("googleapis-common-protos", "grpcio", "grpcio-status", "protobuf")
# What a bare clone has of the package; the generated code is not in it.
SOURCES = ("pyproject.toml", "README.md", "hatch_build.py", ".gitignore", "protos")
PACKAGES = ("shared", "encoder_service", "decoder_service", "lenspair_client")
HEAVY = ("torch", "transformers", "redis", "numpy", "PIL", "pydantic", "structlog", "prometheus_client")
SECONDS = 120

_PROBE = f"""
import importlib.util, sys
import lenspair_client
from lenspair_client import AsyncLenspairClient, LenspairClient
LenspairClient("localhost:1", "localhost:1").close()
ours = [name for name in sys.modules if name.startswith("shared.")]
loaded = [name for name in ours if not name.startswith("shared.pb")]
assert loaded == [], loaded
present = [name for name in {HEAVY!r} if importlib.util.find_spec(name)]
assert present == [], present
assert "site-packages" in lenspair_client.__file__
"""


def run(*command: object, cwd: Path) -> str:
    """What a command prints, errors included; it must succeed, far from this working tree."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a bare clone, built with the build tools of this environment."""
    clone = tmp_path_factory.mktemp("clone")
    for name in SOURCES:
        copy = shutil.copytree if Path(name).is_dir() else shutil.copy
        copy(name, clone / name)
    for name in PACKAGES:
        shutil.copytree(name, clone / name, ignore=shutil.ignore_patterns("pb", "__pycache__"))
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        clone / "dist",
        cwd=clone,
    )
    (built,) = (clone / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with the base package alone, in the versions that this one has."""
    folder = tmp_path_factory.mktemp("environment")
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version(name)}\n" for name in BASE))
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    run(*uv, "pip", "install", "--quiet", "--python", python, "--constraints", constraints, wheel, cwd=folder)
    yield folder / "venv/bin"
    shutil.rmtree(folder)


def test_the_client_imports_without_the_services_needs(environment: Path, tmp_path: Path) -> None:
    run(environment / "python", "-W", "error", "-c", _PROBE, cwd=tmp_path)


def test_the_command_is_there(environment: Path, tmp_path: Path) -> None:
    assert "Ask a Lenspair pair" in run(environment / "lenspair", "--help", cwd=tmp_path)
    assert "Ask a Lenspair pair" in run(
        environment / "python", "-m", "lenspair_client", "--help", cwd=tmp_path
    )
    nobody = subprocess.run(
        [environment / "lenspair", "ask", "--encoder", "127.0.0.1:1", "--decoder", "127.0.0.1:1", "hello"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert nobody.returncode == 3
    assert "Is the pair running?" in nobody.stderr
