"""A context that is stretched by YaRN gives what Transformers gives with the same parameters."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from bench.generated_checkpoint import write_generated_checkpoint
from decoder_service.engine.engine import GenerationRequest, Limits, NoTensors, Sampling
from decoder_service.engine.kv_cache import BlockManager
from decoder_service.engine.kv_pool import KVPool
from decoder_service.engine.language_model import open_language_model, stretch_context, visual_token_ids
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.model_runner import ModelRunner
from decoder_service.engine.scheduler import BatchLimits, Scheduler
from decoder_service.prompt import PromptBuilder, TextPart, Turn
from shared.checkpoint import Checkpoint
from tests.unit.engine.fake_runner import collect, token_ids
from tests.unit.engine.test_equality import running

OWN = 64
QUESTION = "a long question about the sea, " * 20
OUTPUT = 12


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was made for 64 tokens."""
    path = write_generated_checkpoint(tmp_path_factory.mktemp("short"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = OWN
    (path / "config.json").write_text(json.dumps(config))
    return path


async def answer(checkpoint: Path, factor: float) -> list[int | None]:
    model = open_language_model(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), rope_factor=factor
    )
    assert model.context_tokens == OWN * factor
    loop = EngineLoop(
        ModelRunner(model, KVPool(model.kv_shape, 60, model.device)),
        Scheduler(BlockManager(60), BatchLimits()),
        context_tokens=10_000,
    )
    prompt = PromptBuilder.open(Checkpoint(checkpoint, "qwen3_vl", (), "")).build(
        [Turn("user", (TextPart(QUESTION),))], {}
    )
    request = GenerationRequest("a", prompt, NoTensors(), Sampling(), Limits(OUTPUT))
    async with running(loop):
        return token_ids(await collect(loop, request))


@torch.inference_mode()
def expected(checkpoint: Path, factor: float) -> list[int]:
    config = AutoConfig.from_pretrained(checkpoint)
    if factor != 1:
        stretch_context(config.text_config, factor)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, config=config, dtype=torch.float32)
    message = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
    processor = AutoProcessor.from_pretrained(checkpoint)
    text = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], return_tensors="pt")
    assert inputs["input_ids"].shape[1] > OWN
    output = model.eval().generate(
        **inputs,
        max_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(visual_token_ids(config)),
    )
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


async def test_beyond_the_own_length_the_tokens_are_those_of_transformers(short: Path) -> None:
    assert await answer(short, 8.0) == expected(short, 8.0)
    assert expected(short, 8.0) != expected(short, 1.0)


def test_the_sections_of_the_axes_stay(short: Path) -> None:
    config = AutoConfig.from_pretrained(short).text_config
    before = dict(config.rope_parameters)
    stretch_context(config, 4.0)
    assert {**before, **config.rope_parameters} == config.rope_parameters | {"rope_type": "yarn"}
    assert config.rope_parameters["mrope_section"] == before["mrope_section"]
    assert config.rope_parameters["original_max_position_embeddings"] == OWN


def test_a_context_is_not_stretched_twice(short: Path) -> None:
    config = AutoConfig.from_pretrained(short).text_config
    stretch_context(config, 2.0)
    with pytest.raises(ValueError, match="LENSPAIR_ROPE_SCALING_FACTOR"):
        stretch_context(config, 2.0)
