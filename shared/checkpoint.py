"""Which model is served: the checkpoint's directory, configuration, weight files and fingerprint.

It loads no weights and imports no torch; the encoder and the decoder each load their half.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shared.weights import (
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    NoSafeWeights,
    UnsupportedModel,
    read_json,
    vision_fingerprint,
    weight_files,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "DamagedCheckpoint",
    "NoSafeWeights",
    "Placement",
    "UnsupportedModel",
    "choose_placement",
    "open_checkpoint",
]

MODEL_TYPES: Final = ("qwen3_vl", "qwen3_vl_moe")

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Qwen3-VL checkpoint on disk, checked as far as that goes without loading it.

    `fingerprint` identifies its vision tower (see `vision_fingerprint`): features that were made by one
    checkpoint may be used with another one if and only if the two fingerprints are equal.
    """

    path: Path
    model_type: str
    weight_files: tuple[Path, ...]
    fingerprint: str

    @property
    def is_moe(self) -> bool:
        return self.model_type == "qwen3_vl_moe"

    def load_config(self) -> Any:
        """The configuration as Transformers reads it (a Qwen3VLConfig or Qwen3VLMoeConfig)."""
        from transformers import AutoConfig  # noqa: PLC0415  seconds of import that not everyone needs

        return AutoConfig.from_pretrained(self.path)

    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer: of generation_config.json, else of config.json."""
        generation = self.path / "generation_config.json"
        config = read_json(self.path / "config.json")
        sources = [
            read_json(generation) if generation.is_file() else {},
            config.get("text_config") or {},
            config,
        ]
        for source in sources:
            if (ids := source.get("eos_token_id")) is not None:
                return frozenset(ids if isinstance(ids, list) else [ids])
        return frozenset()


def open_checkpoint(source: str) -> Checkpoint:
    """Opens a local directory, or a model of the Hugging Face hub where `source` is no directory.

    Reads every byte of the vision tower once for the fingerprint: about a second for the largest.

    Raises:
        CheckpointError: it can't be served; see the subclasses for the causes.
    """
    path = _locate(source)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise DamagedCheckpoint(f"{config_path} is missing")
    config = read_json(config_path)
    model_type = config.get("model_type")
    vision_config = config.get("vision_config")
    if model_type not in MODEL_TYPES or not isinstance(vision_config, Mapping):
        raise UnsupportedModel(
            f"{config_path} describes a model of type {model_type!r}; served are {', '.join(MODEL_TYPES)}"
        )
    files = weight_files(path)
    return Checkpoint(path, model_type, files, vision_fingerprint(vision_config, files))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model computes: "cpu" or "cuda", and the name of a torch dtype."""

    device: str
    dtype: str


def choose_placement(
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    *,
    has_cuda: bool,
) -> Placement:
    """Resolves "auto": CUDA with bfloat16 where there is a GPU, else the CPU with float32.

    Raises:
        CheckpointError: CUDA was asked for where there is none.
    """
    if device == "cuda" and not has_cuda:
        raise CheckpointError("LENSPAIR_DEVICE is cuda, but torch finds no GPU")
    chosen = "cuda" if device == "auto" and has_cuda else device.replace("auto", "cpu")
    return Placement(chosen, dtype.replace("auto", "bfloat16" if chosen == "cuda" else "float32"))


def _locate(source: str) -> Path:
    path = Path(source)
    if source and path.is_dir():
        return path.resolve()
    if not _HUB_ID.fullmatch(source):
        raise CheckpointNotFound(f"there is no directory {source!r}")
    from huggingface_hub import snapshot_download  # noqa: PLC0415  only needed here

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        raise CheckpointNotFound(
            f"{source} is no directory, and the hub does not give it: {error}"
        ) from error
