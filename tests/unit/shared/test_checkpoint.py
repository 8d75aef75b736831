"""Checkpoints: which can be served, and what tells one vision tower from another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from shared.checkpoint import (
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    NoSafeWeights,
    Placement,
    UnsupportedModel,
    choose_placement,
    open_checkpoint,
)
from shared.weights import VISION_DEFAULTS
from tests.unit.shared.checkpoints import VISION_CONFIG, make_tensors, write_checkpoint

TOWER = "model.visual.patch_embed.proj.weight"
LANGUAGE = "model.language_model.embed_tokens.weight"


@pytest.fixture
def reference(tmp_path: Path) -> str:
    return fingerprint(write_checkpoint(tmp_path / "reference"))


def fingerprint(directory: Path) -> str:
    return open_checkpoint(str(directory)).fingerprint


# --- the fingerprint --------------------------------------------------------------------------------


def test_one_changed_byte_of_the_tower_is_another_tower(tmp_path: Path, reference: str) -> None:
    path = write_checkpoint(tmp_path / "other") / "model.safetensors"
    held = bytearray(path.read_bytes())
    tower = make_tensors()[TOWER].view(torch.uint8).numpy().tobytes()
    held[held.index(tower) + len(tower) - 1] ^= 1
    path.write_bytes(held)
    assert fingerprint(path.parent) != reference


def test_a_language_only_fine_tune_keeps_the_tower(tmp_path: Path, reference: str) -> None:
    tensors = make_tensors()
    tensors[LANGUAGE] += 1
    assert fingerprint(write_checkpoint(tmp_path / "tuned", tensors)) == reference


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_do_not_matter(tmp_path: Path, reference: str, shards: int) -> None:
    assert fingerprint(write_checkpoint(tmp_path / "sharded", shards=shards)) == reference


def test_the_hubs_two_ways_of_naming_do_not_matter(tmp_path: Path, reference: str) -> None:
    renamed = {name.removeprefix("model."): tensor for name, tensor in make_tensors().items()}
    assert fingerprint(write_checkpoint(tmp_path / "renamed", renamed)) == reference


def test_dense_and_moe_models_may_share_a_tower(tmp_path: Path, reference: str) -> None:
    assert fingerprint(write_checkpoint(tmp_path / "moe", model_type="qwen3_vl_moe")) == reference


@pytest.mark.parametrize(
    "change",
    [
        {TOWER: make_tensors()[TOWER].reshape(12, 8)},
        {TOWER: make_tensors()[TOWER].view(torch.float16)},
        {"model.visual.more": torch.zeros(1)},
    ],
    ids=["shape", "dtype", "one more tensor"],
)
def test_shape_dtype_and_names_count(tmp_path: Path, reference: str, change: dict[str, torch.Tensor]) -> None:
    assert fingerprint(write_checkpoint(tmp_path / "other", {**make_tensors(), **change})) != reference


def test_bytes_do_not_move_from_one_tensor_to_the_next(tmp_path: Path) -> None:
    values = torch.arange(4.0)
    first = {"visual.a": values[:3].clone(), "visual.b": values[3:].clone()}
    second = {"visual.a": values[:1].clone(), "visual.b": values[1:].clone()}
    assert fingerprint(write_checkpoint(tmp_path / "first", first)) != fingerprint(
        write_checkpoint(tmp_path / "second", second)
    )


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"num_heads": 4}, False),
        ({"deepstack_visual_indexes": [1]}, False),
        ({"rope_parameters": {"rope_theta": 500.0}}, False),
        ({"unheard_of": 1}, False),
        ({"patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}, True),
        ({"rope_parameters": {"rope_theta": 10000, "rope_type": "axial"}}, True),
        ({"rope_parameters": None}, True),
        ({"dtype": "bfloat16", "transformers_version": "9", "initializer_range": 1}, True),
    ],
    ids=str,
)
def test_configuration_counts_and_spelt_out_defaults_do_not(
    tmp_path: Path, reference: str, change: dict[str, Any], is_same: bool
) -> None:
    other = write_checkpoint(tmp_path / "other", vision_config={**VISION_CONFIG, **change})
    assert (fingerprint(other) == reference) is is_same


def test_our_defaults_are_those_of_transformers() -> None:
    theirs = Qwen3VLVisionConfig().to_dict()
    assert {name: theirs[name] for name in VISION_DEFAULTS} == dict(VISION_DEFAULTS)


# --- opening ----------------------------------------------------------------------------------------


def test_what_a_checkpoint_tells(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "moe", shards=2, model_type="qwen3_vl_moe")))
    assert checkpoint.path == (tmp_path / "moe").resolve()
    assert checkpoint.is_moe
    assert [path.name for path in checkpoint.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    config = checkpoint.load_config()
    assert isinstance(config, Qwen3VLMoeConfig)
    assert config.vision_config.depth == 2


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6}),
        ({"eos_token_id": 5}, {}, {5}),
        ({}, {"text_config": {"eos_token_id": 8}, "eos_token_id": 7}, {8}),
        (None, {"eos_token_id": 7}, {7}),
        (None, {}, set()),
    ],
)
def test_stop_tokens(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    directory = write_checkpoint(tmp_path / "model", **config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(str(directory)).stop_token_ids() == expected


@pytest.mark.parametrize("source", ["/no/such/directory", "./missing", "../a/b", "a/b/c", ""])
def test_a_missing_directory_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(CheckpointNotFound, match="no directory"):
        open_checkpoint(source)


def test_a_model_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="nobody/nothing is no directory"):
        open_checkpoint("nobody/nothing")


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"config\.json is missing"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_an_unreadable_configuration(tmp_path: Path, text: str) -> None:
    (write_checkpoint(tmp_path / "model") / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(DamagedCheckpoint, match=r"config\.json holds no"):
        open_checkpoint(str(tmp_path / "model"))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llama", None])
def test_another_model(tmp_path: Path, model_type: str | None) -> None:
    directory = write_checkpoint(tmp_path / "model", model_type=model_type)
    with pytest.raises(UnsupportedModel, match="qwen3_vl, qwen3_vl_moe"):
        open_checkpoint(str(directory))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(NoSafeWeights, match=r"pytorch_model\.bin is pickled"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ".."]
)
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path / "model", shards=2)
    write_checkpoint(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "other.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {TOWER: name}}))
    with pytest.raises(DamagedCheckpoint, match="no safetensors file beside it"):
        open_checkpoint(str(directory))


def test_a_missing_shard(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(str(directory))


def test_an_index_that_names_a_tensor_nobody_holds(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.visual.lost"] = "model-00001-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedCheckpoint, match=r"model\.visual\.lost"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = write_checkpoint(tmp_path / "model") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedCheckpoint, match="truncated"):
        open_checkpoint(str(path.parent))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
        "nonsense",
    ],
    ids=str,
)
def test_a_header_that_can_not_be(tmp_path: Path, entry: object) -> None:
    path = write_checkpoint(tmp_path / "model") / "model.safetensors"
    header = json.dumps({"model.visual.x": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DamagedCheckpoint, match=r"model\.visual\.x"):
        open_checkpoint(str(path.parent))


def test_a_model_without_a_tower(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", {LANGUAGE: make_tensors()[LANGUAGE]})
    with pytest.raises(DamagedCheckpoint, match="no vision tensors"):
        open_checkpoint(str(directory))


def test_a_tower_that_is_there_twice(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors[TOWER.removeprefix("model.")] = tensors[TOWER].clone()
    with pytest.raises(DamagedCheckpoint, match="second time"):
        open_checkpoint(str(write_checkpoint(tmp_path / "model", tensors)))


# --- placement --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "has_cuda", "expected"),
    [
        ("auto", "auto", True, Placement("cuda", "bfloat16")),
        ("auto", "auto", False, Placement("cpu", "float32")),
        ("cpu", "auto", True, Placement("cpu", "float32")),
        ("cuda", "float16", True, Placement("cuda", "float16")),
        ("auto", "bfloat16", False, Placement("cpu", "bfloat16")),
    ],
)
def test_placement(device: Any, dtype: Any, has_cuda: bool, expected: Placement) -> None:
    assert choose_placement(device, dtype, has_cuda=has_cuda) == expected


def test_cuda_where_there_is_none() -> None:
    with pytest.raises(CheckpointError, match="LENSPAIR_DEVICE"):
        choose_placement("cuda", "auto", has_cuda=False)
