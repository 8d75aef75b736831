"""Owns the training's snapshots on disk (safetensors and JSON); knows nothing of the data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass(frozen=True, slots=True)
class Progress:
    """The next step to run, and the seed that everything so far was run with."""

    stage: int
    step: int
    seed: int


def save_snapshot(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Replaces the last snapshot; a crash in between leaves the old one whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in _named(module).items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    partial = folder / "snapshot.partial"
    progress_text = json.dumps(asdict(progress))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        partial,
        metadata={"progress": progress_text},
    )
    partial.replace(folder / "snapshot.safetensors")
    (folder / "progress.json").write_text(progress_text + "\n", encoding="utf-8")


def load_snapshot(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progress | None:
    path = folder / "snapshot.safetensors"
    if not path.exists():
        return None
    tensors = load_file(path)
    own = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    with torch.no_grad():
        for name, parameter in _named(module).items():
            parameter.copy_(own[name])
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return Progress(**progress)


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in module.named_parameters()}
