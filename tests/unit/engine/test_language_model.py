"""The language half opens from every layout of a checkpoint, and the cache has its rows in their places."""

import json
from pathlib import Path

import pytest
import torch

from bench.generated_checkpoint import DEMO_CHECKPOINT, Kind, write_generated_checkpoint
from decoder_service.engine.kv_cache import BLOCK_TOKENS
from decoder_service.engine.kv_pool import BlockNumbers, KVPool, KVShape
from decoder_service.engine.language_model import LanguageModel, open_language_model

CPU = torch.device("cpu")


def opened(path: Path) -> LanguageModel:
    return open_language_model(path, dtype=torch.float32, device=CPU)


def logits_of(model: LanguageModel) -> torch.Tensor:
    return model.logits(model.embed(torch.arange(model.vocab_size)))


@pytest.mark.parametrize(("kind", "tied"), [("dense", True), ("untied", False), ("moe", False)])
def test_tying_is_the_checkpoint_s_and_nothing_of_the_tower_is_there(
    tmp_path: Path, kind: Kind, tied: bool
) -> None:
    model = opened(write_generated_checkpoint(tmp_path, kind))
    embeds = model.embed(torch.arange(model.vocab_size))
    assert torch.allclose(logits_of(model), embeds @ embeds.T, atol=1e-4) == tied
    assert not any("visual" in name for name in model.parameter_names())


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    whole = write_generated_checkpoint(tmp_path / "whole")
    sharded = write_generated_checkpoint(tmp_path / "sharded", max_shard_size="1MB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(opened(whole)), logits_of(opened(sharded)))


def test_the_shape_is_that_of_the_configuration(tmp_path: Path) -> None:
    model = opened(write_generated_checkpoint(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert model.hidden_size == config["text_config"]["hidden_size"]
    assert model.deepstack_levels == len(config["vision_config"]["deepstack_visual_indexes"])
    assert model.context_tokens == config["text_config"]["max_position_embeddings"]
    assert model.kv_shape == KVShape(4, 2, 32, torch.float32)


def test_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ValueError, match="not a Qwen3-VL checkpoint"):
        opened(tmp_path)


def test_the_demo_checkpoint_opens() -> None:
    if not (DEMO_CHECKPOINT / "model.safetensors").exists():
        pytest.skip("the demo checkpoint is not trained yet")
    assert opened(DEMO_CHECKPOINT).deepstack_levels == 3


def test_a_budget_in_bytes_is_never_exceeded() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
    assert shape.block_bytes == 2 * 2 * 3 * 8 * BLOCK_TOKENS * 2
    assert shape.blocks_within(10 * shape.block_bytes - 1) == 9


def test_what_is_written_to_a_slot_is_read_from_it() -> None:
    pool = KVPool(KVShape(2, 1, 4, torch.float32), 3, CPU)
    slots = torch.tensor([2 * BLOCK_TOKENS + 14, 2 * BLOCK_TOKENS + 15, 0, 1])
    keys, values = torch.randn(2, 4, 1, 4)
    pool.write(1, slots, keys, values)
    rows = pool.gather(1, slots)
    assert torch.equal(rows[:, 0], keys)
    assert torch.equal(rows[:, 1], values)


def test_block_numbers_follow_a_table_that_grows_and_one_that_is_replaced() -> None:
    numbers, table = BlockNumbers(CPU), [3]
    for block in range(100, 140):
        assert numbers.of(table).tolist() == table
        table.append(block)
    assert numbers.of([7, 8]).tolist() == [7, 8]
    assert numbers.of(table).tolist() == table
