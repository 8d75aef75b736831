"""Training sees the pixels, the text and the numbers that the unmodified classes would see."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from demo.batches import IGNORED, Collator, in_reading_order, look_at
from demo.curriculum import held_out
from demo.fast import FastTower, answer_logits
from demo.model import demo_config
from demo.pictures import draw
from demo.pixels import fit, patchify
from demo.questions import Example

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def core() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(core: Tokenizer) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(demo_config(core)).float().eval()


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(CHECKPOINT)


@pytest.mark.parametrize("index", range(3))
def test_patches_are_those_of_the_image_processor(processor: Any, index: int) -> None:
    image = fit(draw(held_out("describe", index, 1).pictures[0]))
    pixels = torch.from_numpy(np.array(image))
    ours = patchify(torch.stack((pixels, pixels))[None])[0]
    theirs = processor.image_processor(image, do_resize=False, return_tensors="pt").pixel_values
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["which picture", "motion", "text only"])
def test_logits_are_those_of_the_whole_model(
    core: Tokenizer, model: Qwen3VLForConditionalGeneration, kind: str
) -> None:
    example = held_out(kind, 0, 1)
    batch = Collator(core, model)([example])
    tower = FastTower(model.model.visual)
    sight = in_reading_order(batch.groups, look_at(tower, batch.groups))
    wanted = batch.labels != IGNORED
    ours = answer_logits(model, batch.ids, batch.positions, sight, wanted)
    theirs = model(input_ids=batch.ids, **_media(model, example, batch.ids)).logits[wanted]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def _media(
    model: Qwen3VLForConditionalGeneration, example: Example, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    frames = [torch.from_numpy(np.array(fit(draw(p)))) for p in example.pictures + example.clip]
    if not frames:
        return {}
    if example.pictures:
        views = [patchify(torch.stack((frame, frame))[None])[0] for frame in frames]
        grids = [[1, frame.shape[0] // 16, frame.shape[1] // 16] for frame in frames]
        names = ("pixel_values", "image_grid_thw")
    else:
        frames += frames[-1:] if len(frames) % 2 else []
        pairs = zip(frames[::2], frames[1::2], strict=True)
        views = [patchify(torch.stack(pair)[None])[0] for pair in pairs]
        grids = [[len(views), frames[0].shape[0] // 16, frames[0].shape[1] // 16]]
        names = ("pixel_values_videos", "video_grid_thw")
    config = model.config
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    return {names[0]: torch.cat(views), names[1]: torch.tensor(grids), "mm_token_type_ids": kinds}
