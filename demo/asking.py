"""Owns asking a checkpoint through the unmodified Transformers classes; knows nothing of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from demo.pictures import draw
from demo.pixels import fit
from demo.questions import Example, Turn

MOST_TOKENS = 32


class Asker:
    """The checkpoint in float32 on the CPU, greedy, with the service's pixel recipe."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._processor.tokenizer.padding_side = "left"
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.eval()

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """The answer to the last question of each; earlier turns are given as they should be."""
        inputs = self._inputs(examples)
        with torch.no_grad():
            ids = self._model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self._processor.batch_decode(new, skip_special_tokens=True)
        return texts

    def margin(self, example: Example) -> float:
        """The smallest lead, in logits, of a right token over the best other one (negative: wrong)."""
        inputs = self._inputs([example])
        answer = self._processor.tokenizer(example.turns[-1][1] + "<|im_end|>")["input_ids"]
        prompt_length = inputs["input_ids"].shape[1]
        forced = dict(inputs)
        for name, tail in (
            ("input_ids", answer),
            ("attention_mask", [1] * len(answer)),
            ("mm_token_type_ids", [0] * len(answer)),
        ):
            forced[name] = torch.cat((inputs[name], torch.tensor([tail])), dim=1)
        with torch.no_grad():
            logits = self._model(**forced).logits[0, prompt_length - 1 : -1]
        right = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        others = logits.scatter(1, torch.tensor(answer)[:, None], float("-inf")).max(dim=1).values
        return float((right - others).min())

    def _inputs(self, examples: Sequence[Example]) -> dict[str, Any]:
        texts = [self._prompt(example) for example in examples]
        images = [fit(image) for example in examples for image in stills(example)]
        clips = [example for example in examples if example.clip]
        media: dict[str, Any] = {}
        if images:
            media["images"] = images
        if clips:
            media["videos"] = [_stack(example) for example in clips]
            media["video_metadata"] = [_metadata(example) for example in clips]
            media["do_sample_frames"] = False
        inputs = self._processor(
            text=texts, **media, do_resize=False, padding=True, return_tensors="pt"
        )
        return dict(inputs)

    def _prompt(self, example: Example) -> str:
        parts = [{"type": "image"}] * len(example.pictures)
        parts += [{"type": "video"}] if example.clip else []
        messages = _messages(example.turns, parts)
        if example.system is not None:
            messages.insert(0, {"role": "system", "content": example.system})
        text: str = self._processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text


def stills(example: Example) -> list[Image.Image]:
    return [draw(picture) for picture in example.pictures]


def _messages(turns: Sequence[Turn], parts: list[dict[str, str]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, (question, answer) in enumerate(turns):
        media = parts if index == 0 else []
        content = [*media, {"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages[:-1]


def _stack(example: Example) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.stack([np.asarray(fit(draw(frame))) for frame in example.clip])


def _metadata(example: Example) -> VideoMetadata:
    count = len(example.clip)
    return VideoMetadata(
        total_num_frames=count, fps=example.fps, frames_indices=list(range(count))
    )
