"""Generates the code of the contracts when a wheel is built and it is not there yet, as in a bare clone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# As in the Makefile: the virtual path makes imports land under shared.pb.
_GENERATED = Path("shared/pb")


class ContractsBuildHook(BuildHookInterface[Any]):
    """Runs protoc, from grpcio-tools, which pyproject.toml requires for builds."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        root = Path(self.root)
        contracts = sorted((root / "protos").rglob("*.proto"))
        names = [_GENERATED / contract.relative_to(root / "protos") for contract in contracts]
        modules = [root / name.with_name(f"{name.stem}_pb2.py") for name in names]
        if not all(map(_is_newer, modules, contracts)):
            _generate(root, names)


def _is_newer(module: Path, contract: Path) -> bool:
    return module.exists() and module.stat().st_mtime >= contract.stat().st_mtime


def _generate(root: Path, names: list[Path]) -> None:
    (root / _GENERATED).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{_GENERATED}=protos"]
    outputs = ["--python_out=.", "--grpc_python_out=."]
    subprocess.run([*command, *outputs, *map(str, names)], cwd=root, check=True)  # noqa: S603  fixed words
