"""What the tests of text share: the demo checkpoint's tokenizer files and its prompts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from decoder_service.prompt import PromptBuilder
from shared.checkpoint import Checkpoint

DEMO = Path(__file__).parents[3] / "demo" / "checkpoint"


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return Checkpoint(DEMO, "qwen3_vl", (), "")


@pytest.fixture(scope="session")
def builder(checkpoint: Checkpoint) -> PromptBuilder:
    return PromptBuilder.open(checkpoint)


@pytest.fixture(scope="session")
def processor() -> Any:
    return AutoProcessor.from_pretrained(DEMO)
