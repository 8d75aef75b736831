"""Owns the shape of the demo model and the files around its weights; knows nothing of training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from demo.tokenizer import write_json, write_tokenizer

PATCH = 16
MERGE = 2
TOKEN_PIXELS = PATCH * MERGE
TEMPORAL_PATCH = 2
MIN_PIXELS = 64 * 64
MAX_PIXELS = 256 * 256
CLIP_FRAMES = 16


def demo_config(core: Tokenizer) -> Qwen3VLConfig:
    """A Qwen3-VL of some three and a half million parameters; ids come from the tokenizer."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    }
    text = {
        "vocab_size": 64 * -(-core.get_vocab_size() // 64),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "bos_token_id": core.token_to_id("<|endoftext|>"),
        "eos_token_id": core.token_to_id("<|im_end|>"),
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1, 2],
        "dtype": "bfloat16",
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=core.token_to_id("<|image_pad|>"),
        video_token_id=core.token_to_id("<|video_pad|>"),
        vision_start_token_id=core.token_to_id("<|vision_start|>"),
        vision_end_token_id=core.token_to_id("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def write_configs(core: Tokenizer, folder: Path) -> None:
    """Everything but the weights, as the hub's Qwen3-VL checkpoints lay it out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(core, folder)
    demo_config(core).save_pretrained(folder)
    ends = [core.token_to_id("<|im_end|>"), core.token_to_id("<|endoftext|>")]
    generation = {
        "bos_token_id": ends[1],
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
    }
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "preprocessor_config.json", _image_processor())
    write_json(folder / "video_preprocessor_config.json", _video_processor())


def _patching() -> dict[str, object]:
    return {
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }


def _image_processor() -> dict[str, object]:
    return {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        **_patching(),
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }


def _video_processor() -> dict[str, object]:
    clip = {"shortest_edge": MIN_PIXELS, "longest_edge": CLIP_FRAMES * 128 * 128}
    return {"size": clip, **_patching(), "video_processor_type": "Qwen3VLVideoProcessor"}


def write_weights(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """The weights in bfloat16 under the hub's names; the tied output matrix is left out."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
