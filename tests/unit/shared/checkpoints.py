"""Writes small checkpoints, with tensors of any names in any files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VISION_CONFIG: Mapping[str, Any] = {
    "deepstack_visual_indexes": [0],
    "depth": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "model_type": "qwen3_vl_vision",
    "num_heads": 2,
    "out_hidden_size": 8,
}


def make_tensors() -> dict[str, torch.Tensor]:
    """Two tensors of a tower and one of a language model, always the same."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model.visual.patch_embed.proj.weight": torch.randn(8, 12, generator=generator).bfloat16(),
        "model.visual.merger.norm.bias": torch.randn(8, generator=generator),
        "model.language_model.embed_tokens.weight": torch.randn(16, 8, generator=generator),
    }


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    vision_config: Mapping[str, Any] = VISION_CONFIG,
    **config: Any,
) -> Path:
    """A directory with config.json and one or several safetensors files."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = {"model_type": "qwen3_vl", "vision_config": dict(vision_config), **config}
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = make_tensors() if tensors is None else tensors
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == shard}
        save_file(part, directory / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
