"""Processors for the encoder's tests; reading one takes a moment, so each is read once."""

from pathlib import Path

import pytest

from encoder_service.preprocess import ImagePreprocessor
from tests.unit.encoder.samples import hub_like


@pytest.fixture(scope="session")
def demo_preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


@pytest.fixture(scope="session")
def hub_preprocessor(tmp_path_factory: pytest.TempPathFactory) -> ImagePreprocessor:
    """With the budgets of the real checkpoints."""
    return ImagePreprocessor.open(hub_like(tmp_path_factory.mktemp("hub")))
