"""What a bundle is made of; what can't be one is found where it is made."""

import pytest
import torch

from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import Modality
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_bundle

WIDTH = (1 + LEVELS) * HIDDEN_SIZE


def bundle_of(tensor: torch.Tensor) -> FeatureBundle:
    return FeatureBundle(Modality.IMAGE, Grid(1, 8, 8), tensor, HIDDEN_SIZE, LEVELS)


# C27
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(WIDTH, 16).T, id="transposed"),
        pytest.param(torch.zeros(32, WIDTH)[::2], id="every other row"),
        pytest.param(torch.zeros(0, WIDTH), id="no rows"),
        pytest.param(torch.zeros(16, WIDTH - 1), id="a value short"),
    ],
)
def test_a_tensor_whose_bytes_are_not_its_rows_is_no_bundle(tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        bundle_of(tensor)


# C27
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_its_size_is_that_of_its_values(dtype: torch.dtype) -> None:
    assert make_bundle(dtype).size_bytes == 16 * WIDTH * dtype.itemsize


def test_levels_are_views_side_by_side() -> None:
    bundle = make_bundle()
    levels = bundle.levels()
    assert len(levels) == 1 + LEVELS
    assert torch.equal(torch.cat(levels, dim=1), bundle.tensor)
    assert {level.untyped_storage().data_ptr() for level in levels} == {
        bundle.tensor.untyped_storage().data_ptr()
    }
