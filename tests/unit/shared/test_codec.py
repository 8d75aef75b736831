"""The codec believes nothing: whatever bytes it is given, it answers with a feature or DamagedRecord."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.features.bundle import FeatureBundle
from shared.features.codec import MAX_MANIFEST_BYTES, FeatureCodec
from shared.features.damage import DamageCause, DamagedRecord
from shared.features.grid import Grid
from shared.features.key import Modality
from shared.features.manifest import Manifest, StoreDtype, stored_dtype
from shared.features.precision import dtype_name
from shared.features.seal import DamageSeal, ForgerySeal
from shared.pb.lenspair.store.v1.feature_pb2 import FeatureManifest
from tests.feature_samples import make_bundle, make_clip, make_key, same_bytes

KEY = make_key()
CODEC = FeatureCodec(fingerprint="f" * 64, chunk_bytes=1008)
SEALED = CODEC.encode(KEY, make_bundle()).sealed_manifest


def decode(codec: FeatureCodec, manifest: Manifest, chunks: Iterator[memoryview]) -> FeatureBundle:
    assembly = codec.assembly(manifest)
    for index, chunk in enumerate(chunks):
        assembly.add(index, chunk)
    return assembly.finish()


def cause_of(sealed: bytes, codec: FeatureCodec = CODEC) -> DamageCause:
    with pytest.raises(DamagedRecord) as caught:
        codec.decode_manifest(KEY, sealed)
    return caught.value.cause


def edited(**fields: object) -> bytes:
    message = FeatureManifest.FromString(SEALED[:-16])
    for name, value in fields.items():
        if isinstance(value, list):
            message.ClearField(name)  # type: ignore[arg-type]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return DamageSeal().close(message.SerializeToString())


@settings(deadline=None)
@given(
    data=st.binary(min_size=2, max_size=2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    chunk_bytes=st.integers(1, 250).map(lambda count: 16 * count),
)
def test_all_finite_16_bit_patterns_survive(data: bytes, dtype: torch.dtype, chunk_bytes: int) -> None:
    pattern = torch.frombuffer(bytearray(data), dtype=dtype)
    if not math.isfinite(pattern.item()):
        return
    bundle = make_bundle(dtype)
    bundle.tensor[3, 5] = pattern[0]
    codec = FeatureCodec(fingerprint="f" * 64, chunk_bytes=chunk_bytes)
    record = codec.encode(KEY, bundle)
    manifest = codec.decode_manifest(KEY, record.sealed_manifest)
    assert manifest == record.manifest
    assert same_bytes(decode(codec, manifest, iter(record.chunks)).tensor, bundle.tensor)


def test_chunks_are_views_of_the_tensor() -> None:
    bundle = make_bundle()
    record = CODEC.encode(KEY, bundle)
    bundle.tensor.zero_()
    assert not any(any(chunk) for chunk in record.chunks)
    assert [len(chunk) for chunk in record.chunks] == [1008, 1008, 1008, 48]


def test_the_manifest_names_what_was_stored() -> None:
    manifest = CODEC.encode(KEY, make_clip()).manifest
    assert manifest.fingerprint == "f" * 64
    assert (manifest.modality, manifest.grid, manifest.merge_size) == (Modality.VIDEO, Grid(2, 8, 8), 2)
    assert (manifest.token_count, manifest.hidden_size, manifest.deepstack_levels) == (32, 24, 3)
    assert (manifest.dtype, manifest.size_bytes, manifest.timestamps) == ("bfloat16", 6144, (0.25, 1.25))


@pytest.mark.parametrize("store_dtype", ["model", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_manifest_tells_the_bytes_in_the_store_and_in_memory(
    dtype: torch.dtype, store_dtype: StoreDtype
) -> None:
    codec = FeatureCodec(fingerprint="f" * 64, chunk_bytes=1008, store_dtype=store_dtype)
    record = codec.encode(KEY, make_bundle(dtype))
    assert record.manifest.dtype == stored_dtype(store_dtype, dtype_name(make_bundle(dtype).tensor))
    assert record.manifest.size_bytes == sum(map(len, record.chunks))
    assert record.manifest.tensor_bytes == decode(CODEC, record.manifest, iter(record.chunks)).size_bytes


def test_fp8_beyond_all_memory_is_refused_before_anything_is_allocated() -> None:
    fields = {
        "dtype": "float8_e4m3fn",
        "grid_h": 1 << 20,
        "grid_w": 1 << 12,
        "token_count": 1 << 30,
        "hidden_size": 1 << 16,
        "deepstack_levels": 63,
        "size_bytes": (1 << 30) * 64 * ((1 << 16) + 1),
        "chunk_bytes": 1 << 62,
        "chunk_checksums": [b"x" * 16],
    }
    assert cause_of(edited(**fields)) is DamageCause.FIELDS


def test_a_record_is_dated_by_the_codecs_clock() -> None:
    now = datetime(2026, 5, 4, 3, 2, 1, 234_567, tzinfo=UTC)
    codec = FeatureCodec(fingerprint="f" * 64, chunk_bytes=1008, now=lambda: now)
    assert codec.encode(KEY, make_bundle()).manifest.created_at == now.replace(microsecond=234_000)


def test_a_record_of_an_older_encoder_has_no_date() -> None:
    assert CODEC.decode_manifest(KEY, edited(created_time_ms=0)).created_at is None


@pytest.mark.parametrize("milliseconds", [-1, 2**62, 253_402_300_800_000])
def test_dates_that_can_not_be_are_damage(milliseconds: int) -> None:
    assert cause_of(edited(created_time_ms=milliseconds)) is DamageCause.FIELDS


def test_two_writes_have_two_ids() -> None:
    first, second = (CODEC.encode(KEY, make_bundle()).manifest for _ in range(2))
    assert first.write_id != second.write_id


def test_a_gradient_does_not_hinder() -> None:
    bundle = make_bundle(torch.float32)
    bundle.tensor.requires_grad_()
    assert CODEC.encode(KEY, bundle).manifest.size_bytes == bundle.size_bytes


def test_every_flipped_bit_of_a_manifest_is_seen() -> None:
    for position in range(len(SEALED)):
        for bit in range(8):
            damaged = bytearray(SEALED)
            damaged[position] ^= 1 << bit
            assert cause_of(bytes(damaged)) is DamageCause.SEAL


def test_every_truncation_of_a_manifest_is_seen() -> None:
    for length in range(len(SEALED)):
        assert cause_of(SEALED[:length]) is DamageCause.SEAL


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_damage(data: bytes) -> None:
    cause_of(data)
    cause_of(DamageSeal().close(data))


int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "layout_version": int32,
            "key": st.text(max_size=10),
            "fingerprint": st.text(max_size=70),
            "modality": int32,
            "grid_t": int32,
            "grid_h": int32,
            "grid_w": int32,
            "token_count": int32,
            "hidden_size": int32,
            "deepstack_levels": int32,
            "dtype": st.sampled_from(["float32", "float64", "", "bfloat16;", "float8_e4m3fn"]),
            "timestamps": st.lists(st.floats(), max_size=3),
            "chunk_bytes": int64,
            "size_bytes": int64,
            "chunk_checksums": st.lists(st.binary(max_size=20), max_size=3),
            "merge_size": int32,
            "write_id": st.text(max_size=40),
        },
    )
)
def test_arbitrary_fields_are_a_manifest_or_damage(fields: dict[str, object]) -> None:
    try:
        manifest = CODEC.decode_manifest(KEY, edited(**fields))
    except DamagedRecord:
        return
    assert manifest.size_bytes == make_bundle().size_bytes
    assert manifest.token_count == manifest.grid.token_count(manifest.merge_size)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_count": 15},
        {"grid_h": 9, "grid_w": 7},
        {"grid_h": 2, "grid_w": 32, "merge_size": 3},
        {"merge_size": 0},
        {"merge_size": -2},
        {"grid_t": -1, "grid_h": -8},
        {"deepstack_levels": -1},
        {"deepstack_levels": 65, "hidden_size": 1},
        {"hidden_size": 0},
        {"hidden_size": -24},
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": ""},
        {"size_bytes": 3071},
        {"size_bytes": -3072},
        {"chunk_bytes": 0},
        {"chunk_bytes": -1008},
        {"chunk_bytes": 512},
        {"chunk_bytes": 1000},
        {"chunk_checksums": []},
        {"chunk_checksums": [b""] * 4},
        {"chunk_checksums": [b"x" * 32] * 4},
        {"modality": 0},
        {"modality": 3},
        {"modality": 2},
        {"timestamps": [0.5]},
        {"modality": 2, "timestamps": [float("nan")]},
        {"fingerprint": "f" * 63},
        {"fingerprint": "F" * 64},
        {"write_id": ""},
        {"write_id": "0" * 31 + "}"},
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_damage(fields: dict[str, object]) -> None:
    assert cause_of(edited(**fields)) is DamageCause.FIELDS


def test_sizes_beyond_all_memory_are_refused_before_anything_is_allocated() -> None:
    fields = {
        "grid_h": 1 << 20,
        "grid_w": 1 << 12,
        "token_count": 1 << 30,
        "hidden_size": 1 << 16,
        "deepstack_levels": 63,
        "size_bytes": (1 << 30) * (1 << 22) * 2,
        "chunk_bytes": 1 << 62,
        "chunk_checksums": [b"x" * 16],
    }
    assert cause_of(edited(**fields)) is DamageCause.FIELDS


def test_a_manifest_has_a_largest_size() -> None:
    assert cause_of(bytes(MAX_MANIFEST_BYTES + 1)) is DamageCause.SIZE


def test_a_valid_record_of_another_key_is_damage() -> None:
    with pytest.raises(DamagedRecord) as caught:
        CODEC.decode_manifest(make_key("b"), SEALED)
    assert caught.value.cause is DamageCause.KEY


def test_fields_of_a_later_version_of_the_message_do_not_hinder() -> None:
    payload = SEALED[:-16] + b"\xa2\x06\x03new"
    assert CODEC.decode_manifest(KEY, DamageSeal().close(payload)).token_count == 16


def test_store_keys_do_not_open_one_another() -> None:
    codecs = [
        FeatureCodec(fingerprint="f" * 64, chunk_bytes=1008, store_key=store_key)
        for store_key in (None, b"one", b"two")
    ]
    for writer in codecs:
        sealed = writer.encode(KEY, make_bundle()).sealed_manifest
        for reader in codecs:
            if reader is writer:
                assert reader.decode_manifest(KEY, sealed).token_count == 16
            else:
                assert cause_of(sealed, reader) is DamageCause.SEAL


def test_an_empty_store_key_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        ForgerySeal(b"")


@pytest.mark.parametrize("fingerprint", ["", "f" * 63, "F" * 64, "x" * 64])
def test_a_codec_needs_a_fingerprint(fingerprint: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        FeatureCodec(fingerprint=fingerprint, chunk_bytes=1008)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_damage(value: float) -> None:
    bundle = make_bundle()
    bundle.tensor[-1, -1] = value
    record = CODEC.encode(KEY, bundle)
    with pytest.raises(DamagedRecord) as caught:
        decode(CODEC, record.manifest, iter(record.chunks))
    assert caught.value.cause is DamageCause.NOT_FINITE


def test_chunks_belong_to_their_places() -> None:
    record = CODEC.encode(KEY, make_bundle())
    assembly = CODEC.assembly(record.manifest)
    for index, chunk, cause in (
        (0, record.chunks[1], DamageCause.CHECKSUM),
        (0, record.chunks[0][:-1], DamageCause.LENGTH),
        (3, record.chunks[0], DamageCause.LENGTH),
    ):
        with pytest.raises(DamagedRecord) as caught:
            assembly.add(index, chunk)
        assert caught.value.cause is cause


def test_c28_one_token_less_than_the_grid_says_is_never_written() -> None:
    whole = make_bundle()
    short = FeatureBundle(whole.modality, whole.grid, whole.tensor[:15].clone(), 24, 3)
    with pytest.raises(ValueError, match="fields"):
        CODEC.encode(KEY, short)
