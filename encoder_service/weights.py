"""The vision tensors of a checkpoint, by name, straight from its safetensors files."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

# As Transformers 5 and the hub name them, and as older releases did.
_PREFIXES = ("model.visual.", "visual.")


def vision_tensors(
    directory: Path, *, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the tower under its name within the tower, in memory of its own."""
    for path, names in _files(directory).items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                copied = torch.empty(file.get_slice(name).get_shape(), device=device, dtype=dtype)
                yield _within_tower(name), copied.copy_(file.get_tensor(name))


def _files(directory: Path) -> dict[Path, list[str]]:
    """Which file holds which vision tensors."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        file_of = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            file_of = dict.fromkeys(file.keys(), "model.safetensors")
    files: dict[Path, list[str]] = defaultdict(list)
    for name, file_name in file_of.items():
        if name.startswith(_PREFIXES):
            files[directory / file_name].append(name)
    return files


def _within_tower(name: str) -> str:
    return name.split("visual.", maxsplit=1)[1]
