"""Writes Qwen3-VL checkpoints of random weights in the layout of real ones; knows no service.

The usual initialization makes a model that repeats one token, and then every comparison of answers holds.
Here each matrix keeps the size of what passes through it, attention is sharp enough to look somewhere, and
the layers outweigh the embedding of the last token in the residual stream: answers differ from prompt to
prompt, and a feature that is lost or mixed up shows in them.

    python -m bench.generated_checkpoint --kind dense --out .cache/dense
"""

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

Kind = Literal["dense", "untied", "moe", "moe_hub_layout"]
Size = Literal["small", "medium", "vision", "big"]
KINDS: tuple[Kind, ...] = get_args(Kind)

DEMO_CHECKPOINT = Path(__file__).parent.parent / "demo" / "checkpoint"
COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

# How loud the embedding of a token is, how much a layer adds to the residual stream, how sharp attention
# is, and how loud a picture is.
EMBEDDING_STD = 0.1
BRANCH_GAIN = 1.5
SHARPNESS = 2.0
VISUAL_GAIN = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The 2B's shape, scaled down: kv heads half of the heads, three times the hidden size between the two
    matrices of a layer's MLP, a tower half as wide as the text, and three DeepStack levels.
    """

    text_hidden: int
    text_layers: int
    heads: int
    head_dim: int
    vision_layers: int
    deepstack: tuple[int, int, int]

    @property
    def mrope_section(self) -> list[int]:
        side = self.head_dim // 2 * 5 // 16
        return [self.head_dim // 2 - 2 * side, side, side]


SHAPES: dict[Size, Shape] = {
    "small": Shape(128, 4, 4, 32, 6, (1, 2, 4)),
    "medium": Shape(512, 12, 8, 64, 12, (2, 5, 8)),
    "vision": Shape(768, 4, 6, 64, 12, (2, 5, 8)),
    "big": Shape(1024, 8, 16, 64, 24, (2, 5, 8)),
}


def write_generated_checkpoint(
    path: Path,
    kind: Kind = "dense",
    *,
    size: Size = "small",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    files_from: Path = DEMO_CHECKPOINT,
) -> Path:
    """Writes a checkpoint of random weights to the directory `path` and returns it.

    Tokenizer, processor settings and chat template are those of the checkpoint `files_from`. A size of
    "big" has more than 200 MB in each half, "vision" a tower of about 35 M parameters. "moe_hub_layout"
    stores experts as the hub does, `[E, in, out]`.
    """
    path.mkdir(parents=True, exist_ok=True)
    base = json.loads((files_from / "config.json").read_text())
    model = _random_model(_config(kind, SHAPES[size], base), seed).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if kind == "moe_hub_layout":
        for file in path.glob("*.safetensors"):
            _transpose_experts(file)
    for name in COPIED_FILES:
        if (files_from / name).exists():
            shutil.copyfile(files_from / name, path / name)
    return path


def _config(kind: Kind, shape: Shape, base: dict[str, Any]) -> Qwen3VLConfig | Qwen3VLMoeConfig:
    tied = kind == "dense"
    text = _text_config(shape, base["text_config"]) | {"tie_word_embeddings": tied}
    token_ids = {name: base[name] for name in base if name.endswith("_token_id")}
    common = token_ids | {"vision_config": _vision_config(shape), "tie_word_embeddings": tied}
    if kind in ("dense", "untied"):
        return Qwen3VLConfig(text_config=text, **common)
    experts = {
        "moe_intermediate_size": shape.text_hidden * 3 // 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return Qwen3VLMoeConfig(text_config=text | experts, **common)


def _text_config(shape: Shape, base: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": base["vocab_size"],
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "hidden_size": shape.text_hidden,
        "intermediate_size": shape.text_hidden * 3,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads // 2,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_interleaved": True,
            "mrope_section": shape.mrope_section,
        },
    }


def _vision_config(shape: Shape) -> dict[str, Any]:
    hidden = shape.text_hidden // 2
    return {
        "depth": shape.vision_layers,
        "hidden_size": hidden,
        "intermediate_size": hidden * 4,
        "num_heads": shape.heads,
        "out_hidden_size": shape.text_hidden,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": list(shape.deepstack),
    }


def _random_model(
    config: Qwen3VLConfig | Qwen3VLMoeConfig, seed: int
) -> Qwen3VLForConditionalGeneration | Qwen3VLMoeForConditionalGeneration:
    dense = isinstance(config, Qwen3VLConfig)
    model = (Qwen3VLForConditionalGeneration if dense else Qwen3VLMoeForConditionalGeneration)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        _fill(name, parameter.data, generator)
    return model


def _fill(name: str, values: torch.Tensor, generator: torch.Generator) -> None:
    """Matrices keep the variance of their inputs, times the gain of their place; see the top."""
    if values.ndim == 1:
        is_bias = name.endswith("bias")
        values.fill_(0.0 if is_bias else SHARPNESS if _is_sharpened(name) else 1.0)
        return
    fan_in = math.prod(values.shape[1:]) if "experts" not in name else values.shape[-1]
    embeds = name.endswith(("embed_tokens.weight", "pos_embed.weight"))
    values.normal_(std=EMBEDDING_STD if embeds else _gain(name) / math.sqrt(fan_in), generator=generator)


def _is_sharpened(name: str) -> bool:
    return name.endswith(("q_norm.weight", "k_norm.weight"))


def _gain(name: str) -> float:
    if "merger" in name and "linear_fc2" in name:
        return VISUAL_GAIN
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        return BRANCH_GAIN
    return 1.0


def _transpose_experts(file: Path) -> None:
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Qwen3-VL checkpoint of random weights.")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--size", choices=get_args(Size), default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write_generated_checkpoint(arguments.out, arguments.kind, size=arguments.size, seed=arguments.seed)
    print(arguments.out)


if __name__ == "__main__":
    main()
