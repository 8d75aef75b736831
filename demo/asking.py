"""Owns asking a checkpoint through the unmodified Transformers classes; knows nothing of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, the last of which is to be answered, and what is shown in the first one."""

    turns: tuple[Turn, ...]
    images: tuple[Image.Image, ...] = ()
    frames: tuple[Image.Image, ...] = ()
    fps: float = 2.0
    system: str | None = None


def as_conversation(example: Example) -> Conversation:
    """The example with its pictures drawn and brought to the size that is served."""
    images = tuple(fit(draw(picture)) for picture in example.pictures)
    frames = tuple(fit(draw(frame)) for frame in example.clip)
    return Conversation(example.turns, images, frames, example.fps, example.system)


class Asker:
    """The checkpoint in float32 on the CPU, greedy, with the service's pixel recipe."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._processor.tokenizer.padding_side = "left"
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.eval()

    def answers(self, conversations: Sequence[Conversation]) -> list[str]:
        """The answer to the last question of each; earlier turns are given as they should be."""
        inputs = self._inputs(conversations)
        with torch.no_grad():
            ids = self._model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts: list[str] = self._processor.batch_decode(new, skip_special_tokens=True)
        return texts

    def margin(self, conversation: Conversation) -> float:
        """The smallest lead, in logits, of a true token over the best other (negative: wrong)."""
        inputs = self._inputs([conversation])
        answer = self._processor.tokenizer(conversation.turns[-1][1] + "<|im_end|>")["input_ids"]
        prompt_length = inputs["input_ids"].shape[1]
        tails = {
            "input_ids": answer,
            "attention_mask": [1] * len(answer),
            "mm_token_type_ids": [0] * len(answer),
        }
        for name, tail in tails.items():
            inputs[name] = torch.cat((inputs[name], torch.tensor([tail])), dim=1)
        with torch.no_grad():
            logits = self._model(**inputs).logits[0, prompt_length - 1 : -1]
        truth = torch.tensor(answer)[:, None]
        others = logits.scatter(1, truth, float("-inf")).max(dim=1).values
        return float((logits.gather(1, truth)[:, 0] - others).min())

    def _inputs(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        images = [image for one in conversations for image in one.images]
        clips = [one for one in conversations if one.frames]
        media: dict[str, Any] = {"images": images} if images else {}
        if clips:
            media["videos"] = [np.stack([np.asarray(frame) for frame in one.frames]) for one in clips]
            media["video_metadata"] = [_metadata(one) for one in clips]
            media["do_sample_frames"] = False
        texts = [self._prompt(one) for one in conversations]
        inputs = self._processor(text=texts, **media, do_resize=False, padding=True, return_tensors="pt")
        return dict(inputs)

    def _prompt(self, conversation: Conversation) -> str:
        text: str = self._processor.apply_chat_template(
            _messages(conversation), tokenize=False, add_generation_prompt=True
        )
        return text


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    media = [{"type": "image"}] * len(conversation.images)
    media += [{"type": "video"}] if conversation.frames else []
    for index, (question, answer) in enumerate(conversation.turns):
        content = [*(media if index == 0 else []), {"type": "text", "text": question}]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages[:-1]


def _metadata(conversation: Conversation) -> VideoMetadata:
    count = len(conversation.frames)
    return VideoMetadata(total_num_frames=count, fps=conversation.fps, frames_indices=list(range(count)))
