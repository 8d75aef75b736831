"""The generated code and the runtimes that it meets (R20)."""

import importlib
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

PACKAGES = ["encoder", "decoder"]
FILES = {"encoder": "encoder", "decoder": "decoder", "store": "feature"}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize("package", FILES)
def test_generated_modules_import_with_the_locked_runtimes(package: str) -> None:
    name = f"shared.pb.lenspair.{package}.v1.{FILES[package]}"
    assert importlib.import_module(f"{name}_pb2").DESCRIPTOR.package == f"lenspair.{package}.v1"
    importlib.import_module(f"{name}_pb2_grpc")
    importlib.import_module("grpc_health.v1.health_pb2")
    importlib.import_module("grpc_reflection.v1alpha.reflection_pb2")


def test_the_lowest_allowed_runtimes_are_no_older_than_the_generated_code() -> None:
    """Generated code refuses an older runtime on import: the declared minimum must forbid one."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lowest = dict(line.split(">=") for line in project["dependencies"])
    module = importlib.import_module("shared.pb.lenspair.encoder.v1.encoder_pb2_grpc")
    assert numbers(lowest["grpcio"]) >= numbers(module.GRPC_GENERATED_VERSION)
    source = Path(
        str(importlib.import_module("shared.pb.lenspair.encoder.v1.encoder_pb2").__file__)
    ).read_text()
    generated = next(line for line in source.splitlines() if line.startswith("# Protobuf Python Version:"))
    assert numbers(lowest["protobuf"]) >= numbers(generated.rpartition(" ")[2])
    assert numbers(version("protobuf")) >= numbers(lowest["protobuf"])
