"""Opens the language half of a checkpoint and runs it on a packed row; knows no requests.

The half loads as the full model class without its tower, so that Transformers' own conversions of weights
(the hub stores experts transposed) and its rules for tied embeddings apply. Vision weights stay on the disk.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from decoder_service.engine.attention import PackedPlan
from decoder_service.engine.checks import ModelShape
from decoder_service.engine.kv_pool import KVShape
from decoder_service.engine.text_layers import Rotation, TextLayer, norm
from shared.frozen_linear import return_freed_memory

_VISION_WEIGHTS = [r"^model\.visual\."]


class _DenseLanguageHalf(Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    _keys_to_ignore_on_load_unexpected = _VISION_WEIGHTS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.visual = None


class _MoeLanguageHalf(Qwen3VLMoeForConditionalGeneration):  # type: ignore[misc]
    _keys_to_ignore_on_load_unexpected = _VISION_WEIGHTS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.visual = None


_HALVES: dict[str, Any] = {"qwen3_vl": _DenseLanguageHalf, "qwen3_vl_moe": _MoeLanguageHalf}


class LanguageModel:
    """The text model of a Qwen3-VL and its output matrix."""

    def __init__(self, half: Any) -> None:
        self._half = half
        self._text = half.model.language_model
        self._layers = [TextLayer(layer, number) for number, layer in enumerate(self._text.layers)]
        _leave_file(half)
        return_freed_memory()
        text = half.config.text_config
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.visual_token_ids = frozenset(visual_token_ids(half.config))
        self.context_tokens: int = text.max_position_embeddings
        self.deepstack_levels = len(half.config.vision_config.deepstack_visual_indexes)
        self.device: torch.device = half.device
        self.dtype: torch.dtype = half.dtype
        self.shape = ModelShape(self.vocab_size, self.hidden_size, self.deepstack_levels)
        self.kv_shape = KVShape(
            num_layers=text.num_hidden_layers,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            dtype=half.dtype,
        )

    def parameter_names(self) -> list[str]:
        """The weights in memory, by the checkpoint's names."""
        return [name for name, _ in self._half.named_parameters()]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[N]` token ids to `[N, hidden_size]`."""
        embedded: torch.Tensor = self._text.embed_tokens(token_ids)
        return embedded

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        visual_rows: torch.Tensor,
        deepstack: Sequence[torch.Tensor],
        plan: PackedPlan,
    ) -> torch.Tensor:
        """Runs the layers over a packed row and gives its hidden states, `[N, hidden_size]`.

        `embeds` is `[N, hidden_size]`, `positions` `[3, N]` (temporal, height, width). To the rows
        `visual_rows`, `deepstack` has what is added behind each of the first layers, `[visual rows,
        hidden_size]`; it is empty in a step without visual rows.
        """
        cos, sin = self._text.rotary_emb(embeds[None], positions[:, None])
        rotation = Rotation(cos[0, :, None], sin[0, :, None])
        hidden = embeds
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(hidden, rotation, plan)
            if number < len(deepstack):
                hidden.index_add_(0, visual_rows, deepstack[number])
        return norm(self._text.norm, hidden)

    def multiply_all(self, rows: int) -> None:
        """Only the matrix products of a step with `rows` rows: the floor under its time."""
        hidden = torch.ones(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        for layer in self._layers:
            layer.multiply_all(hidden)
        self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, hidden_size]` to `[R, vocab_size]`, in float32."""
        logits: torch.Tensor = self._half.lm_head(hidden)
        return logits.float()


def _leave_file(half: Any) -> None:
    """Copies the weights that still lie in the mapped checkpoint, so that it can be let go."""
    for parameter in half.parameters():
        parameter.data = parameter.data.clone()


def visual_token_ids(config: Any) -> Iterator[int]:
    """Tokens that stand for pictures and clips, or around them: a caller's to place, never the model's."""
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        yield int(getattr(config, name))


def stretch_context(text_config: Any, factor: float) -> None:
    """Makes the context `factor` times longer by YaRN (Peng et al., 2023), as Transformers computes it.

    Raises:
        ValueError: the checkpoint stretches its positions already.
    """
    parameters = dict(text_config.rope_parameters)
    if parameters["rope_type"] != "default":
        raise ValueError(
            f"the checkpoint's own rope scaling ({parameters['rope_type']}) can't be scaled again; "
            "leave LENSPAIR_ROPE_SCALING_FACTOR at 1"
        )
    own = text_config.max_position_embeddings
    text_config.rope_parameters = parameters | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": own,
    }
    text_config.max_position_embeddings = int(own * factor)


def open_language_model(
    checkpoint: Path, *, dtype: torch.dtype, device: torch.device, rope_factor: float = 1.0
) -> LanguageModel:
    """Loads the language half of the checkpoint in a local directory.

    Raises:
        ValueError: the checkpoint is not a Qwen3-VL, or its context can't be stretched.
    """
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    half_class = _HALVES.get(config.model_type)
    if half_class is None:
        raise ValueError(f"not a Qwen3-VL checkpoint: its model_type is {config.model_type!r}")
    if rope_factor != 1:
        stretch_context(config.text_config, rope_factor)
    half = half_class.from_pretrained(
        checkpoint,
        config=config,
        dtype=dtype,
        local_files_only=True,
    )
    return LanguageModel(half.to(device).eval().requires_grad_(False))
