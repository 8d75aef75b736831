"""The tower alone, against the whole model of Transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from bench.generated_checkpoint import Kind, write_generated_checkpoint
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.tower import Patches
from encoder_service.vision_model import VisionModel
from shared.checkpoint import Placement, open_checkpoint
from shared.features.key import EffectiveSettings
from tests.unit.encoder.samples import noise, patches_of

CPU = Placement("cpu", "float32")
SETTINGS = EffectiveSettings(do_resize=True, min_pixels=4096, max_pixels=65_536)
SIZES = [(64, 64), (128, 96), (64, 64), (300, 40), (256, 256), (33, 65)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_generated_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> VisionModel:
    return VisionModel.open(open_checkpoint(str(checkpoint)), CPU)


@pytest.fixture(scope="module")
def pictures(demo_preprocessor: ImagePreprocessor) -> list[Patches]:
    return [
        patches_of(demo_preprocessor, noise(*size, seed=seed), SETTINGS) for seed, size in enumerate(SIZES)
    ]


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both round each of some hundred operations; their distance to float64 is the same."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ["dense", "moe", "moe_hub_layout"])
def test_features_equal_those_of_the_whole_model(tmp_path: Path, pictures: list[Patches], kind: Kind) -> None:
    write_generated_checkpoint(tmp_path, kind)
    ours = VisionModel.open(open_checkpoint(str(tmp_path)), CPU).encode(pictures)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    grids = torch.tensor([[one.grid.t, one.grid.h, one.grid.w] for one in pictures])
    pixels = torch.cat([one.pixel_values for one in pictures])
    with torch.inference_mode():
        reference = whole.model.get_image_features(pixels, grids)
    for index, bundle in enumerate(ours):
        main, *deepstack = bundle.levels()
        _assert_close(main, reference.pooler_output[index])
        for level, want in zip(deepstack, reference.deepstack_features, strict=True):
            _assert_close(level, want[index])


# G06, I48
def test_an_item_does_not_depend_on_its_batch(model: VisionModel, pictures: list[Patches]) -> None:
    together = model.encode(pictures)
    scale = max(float(bundle.tensor.abs().max()) for bundle in together)
    for patches, bundle in zip(pictures, together, strict=True):
        (alone,) = model.encode([patches])
        torch.testing.assert_close(bundle.tensor, alone.tensor, rtol=0, atol=1e-5 * scale)


# G07
def test_every_bundle_has_its_own_grid_and_memory(model: VisionModel, pictures: list[Patches]) -> None:
    for batch in (pictures[:1], pictures[:2], pictures):
        for patches, bundle in zip(batch, model.encode(batch), strict=True):
            assert bundle.grid == patches.grid
            assert bundle.token_count == patches.grid.token_count(2)
            assert bundle.tensor.is_contiguous()
            assert bundle.tensor.untyped_storage().nbytes() == bundle.size_bytes


def test_features_have_the_dtype_of_the_model(checkpoint: Path, pictures: list[Patches]) -> None:
    half = VisionModel.open(open_checkpoint(str(checkpoint)), Placement("cpu", "bfloat16"))
    (bundle,) = half.encode(pictures[:1])
    assert bundle.tensor.dtype == torch.bfloat16
    assert dict(half.namespace_fields())["compute_dtype"] == "bfloat16"


def test_names_of_older_releases_are_understood(
    tmp_path: Path, checkpoint: Path, model: VisionModel, pictures: list[Patches]
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    old = VisionModel.open(open_checkpoint(str(tmp_path)), CPU)
    assert torch.equal(old.encode(pictures[:1])[0].tensor, model.encode(pictures[:1])[0].tensor)


@pytest.mark.parametrize("change", ["missing", "unknown", "misshapen"])
def test_a_tower_that_does_not_fit_is_refused(tmp_path: Path, checkpoint: Path, change: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.visual.merger.norm.weight"
    match change:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors["model.visual.extra"] = torch.zeros(1)
        case "misshapen":
            tensors[name] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(RuntimeError):
        VisionModel.open(open_checkpoint(str(tmp_path)), CPU)


def test_a_tower_alone_is_enough(tmp_path: Path, checkpoint: Path, pictures: list[Patches]) -> None:
    """No language weight is needed, so none can have been read."""
    tensors = load_file(checkpoint / "model.safetensors")
    vision = {name: tensor for name, tensor in tensors.items() if name.startswith("model.visual.")}
    save_file(vision, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert len(VisionModel.open(open_checkpoint(str(tmp_path)), CPU).encode(pictures)) == len(pictures)
