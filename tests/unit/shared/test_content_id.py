"""Ids of contents: equal for the same tensor of the same key, and for nothing else."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from shared.features.content_id import content_id
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality
from shared.features.manifest import Manifest

MANIFEST = Manifest(
    key=FeatureKey("0" * 64, "1" * 64, "2" * 64),
    fingerprint="f" * 64,
    modality=Modality.IMAGE,
    grid=Grid(1, 4, 8),
    token_count=8,
    hidden_size=24,
    deepstack_levels=3,
    dtype="float32",
    timestamps=(),
    chunk_bytes=4096,
    size_bytes=3072,
    chunk_checksums=(b"a" * 16, b"b" * 16),
    write_id="first",
)
GOLDEN = "f7c4ae8838f3276b283244c4b8e491ad86f1baf39a2ec626d25064ba28950ace"


def test_the_id_is_what_it_was() -> None:
    """Golden: pods of one version must agree, and a change of it must be meant."""
    assert content_id(MANIFEST).hex() == GOLDEN


def test_who_wrote_it_and_when_does_not_matter() -> None:
    again = replace(MANIFEST, write_id="second", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert content_id(again) == content_id(MANIFEST)


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, key=FeatureKey("3" * 64, "1" * 64, "2" * 64)),
        replace(MANIFEST, key=FeatureKey("0" * 64, "1" * 64, "3" * 64)),
        replace(MANIFEST, fingerprint="e" * 64),
        replace(MANIFEST, grid=Grid(1, 8, 4)),
        replace(MANIFEST, dtype="bfloat16"),
        replace(MANIFEST, token_count=16),
        replace(MANIFEST, hidden_size=48),
        replace(MANIFEST, deepstack_levels=2),
        replace(MANIFEST, chunk_checksums=(b"b" * 16, b"a" * 16)),
        replace(MANIFEST, chunk_checksums=(b"a" * 16,)),
        replace(MANIFEST, chunk_checksums=(b"a" * 15, b"ab" + b"b" * 15)),
    ],
)
def test_whatever_decides_the_tensor_is_in_it(other: Manifest) -> None:
    assert content_id(other) != content_id(MANIFEST)
