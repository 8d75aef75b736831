"""The unmodified Transformers model on the pixels: what the pair must equal, token for token.

Pictures take the documented road: `qwen_vl_utils` resizes once, the checkpoint's processor does not
resize again. One request at a time, greedy, float32.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils.vision_process import fetch_image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from bench.requests import FrameClip, VerifyRequest
from decoder_service.engine.language_model import visual_token_ids

END = -1
"""Stands for whichever token ended an answer."""


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """What the reference says: `token_ids` (END last when the model ended its answer), for each of them
    the gap between the two best logits over the largest absolute logit, and the log-probabilities of
    the best tokens at the first place."""

    token_ids: tuple[int, ...]
    relative_gaps: tuple[float, ...]
    first_logprobs: dict[int, float]


class Reference:
    """The whole model of a checkpoint, in float32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.eval()
        stop = self._model.generation_config.eos_token_id
        self._stop_ids = frozenset([stop] if isinstance(stop, int) else stop)

    @torch.inference_mode()
    def answer(self, request: VerifyRequest) -> ReferenceAnswer:
        inputs = self._inputs(request)
        output = self._model.generate(
            **inputs,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            suppress_tokens=list(
                visual_token_ids(self._model.config)
            ),  # a caller's to place, never an answer
            max_new_tokens=request.max_output_tokens,
            min_new_tokens=request.min_output_tokens or None,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        prompt_tokens = inputs["input_ids"].shape[1]
        token_ids = output.sequences[0, prompt_tokens:].tolist()
        first = torch.log_softmax(output.logits[0][0].float(), dim=-1)
        best = first.topk(20)
        return ReferenceAnswer(
            token_ids=tuple(END if token in self._stop_ids else token for token in token_ids),
            relative_gaps=tuple(_relative_gap(scores[0].float()) for scores in output.scores),
            first_logprobs=dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        )

    def _inputs(self, request: VerifyRequest) -> Any:
        limits = self._processor.image_processor.size
        budget = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        shown = [
            {"type": "video"}
            if isinstance(each, FrameClip)
            else {"type": "image", "image": _open(each), **budget}
            for each in request.media
        ]
        said = [text for each in request.earlier for text in (each.question, each.answer)]
        messages: list[dict[str, Any]] = [
            {"role": ("user", "assistant")[place % 2], "content": [{"type": "text", "text": text}]}
            for place, text in enumerate([*said, request.question])
        ]
        messages[0]["content"] = [*shown, *messages[0]["content"]]
        text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        patch = self._processor.image_processor.patch_size
        pictures = [part for part in shown if part["type"] == "image"]
        resized = [fetch_image(part, image_patch_size=patch) for part in pictures]
        clips = [each for each in request.media if isinstance(each, FrameClip)]
        return self._processor(
            text=[text], images=resized or None, do_resize=False, return_tensors="pt", **_clip_inputs(clips)
        )


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def _clip_inputs(clips: Sequence[FrameClip]) -> dict[str, Any]:
    """Clips of their final size, every frame of them, with the times that they say."""
    if not clips:
        return {}
    return {
        "videos": [np.stack([np.asarray(_open(frame)) for frame in clip.frames]) for clip in clips],
        "video_metadata": [
            VideoMetadata(
                total_num_frames=len(clip.frames), fps=clip.fps, frames_indices=list(range(len(clip.frames)))
            )
            for clip in clips
        ],
        "do_sample_frames": False,
    }


def _relative_gap(scores: torch.Tensor) -> float:
    """Scores may hold -inf for forbidden tokens."""
    best, second = scores.topk(2).values.tolist()
    largest = scores[torch.isfinite(scores)].abs().max().item()
    return float((best - second) / largest)
