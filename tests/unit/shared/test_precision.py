"""The two narrower dtypes, against exact arithmetic: nearest values, no infinities, damage stays visible."""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.features.damage import DamageCause, DamagedRecord
from shared.features.manifest import BFLOAT16, FP8
from shared.features.precision import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    from_stored,
    stored_size,
    to_stored,
)
from tests.feature_samples import same_bytes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS, LEVELS, HIDDEN = 3, 2, 4
NARROWER = [
    (torch.float32, BFLOAT16),
    (torch.float16, BFLOAT16),
    *((dtype, FP8) for dtype in DTYPES),
]


def code_value(code: int) -> Fraction:
    """What the OCP 8-bit specification says that a code of e4m3 below 0x7f is worth."""
    exponent, mantissa = code >> 3, code & 7
    return (
        Fraction(mantissa, 2**9) if exponent == 0 else Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)
    )


CODE_VALUES = [code_value(code) for code in range(127)]


def nearest_code(value: Fraction) -> int:
    """Of a number from 0 to 448; ties go to the even code."""
    return min(range(127), key=lambda code: (abs(CODE_VALUES[code] - value), code & 1))


def least_exponent(largest: Fraction) -> int:
    fitting = (e for e in range(MIN_EXPONENT, MAX_EXPONENT) if largest <= 448 * Fraction(2) ** e)
    return next(fitting, MAX_EXPONENT)


def fp8_row(values: list[float], top: float) -> list[float]:
    """One row of one level by the specification: saturate, scale, round, scale back."""
    exact = [Fraction(max(-top, min(top, value))) for value in values]
    scale = Fraction(2) ** least_exponent(max(map(abs, exact)))
    rounded = [CODE_VALUES[nearest_code(abs(value) / scale)] * scale for value in exact]
    return [math.copysign(float(size), value) for size, value in zip(rounded, values, strict=True)]


def bits_to_tensor(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    data = b"".join(struct.pack("<I", each)[4 - dtype.itemsize :] for each in bits)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(ROWS, -1)


def round_trip(tensor: torch.Tensor, dtype: str, levels: int = LEVELS) -> torch.Tensor:
    data = to_stored(tensor, dtype, levels=levels)
    rows, width = tensor.shape
    assert data.dtype == torch.uint8
    assert data.is_contiguous()
    assert data.numel() == stored_size(dtype, rows=rows, levels=levels, hidden_size=width // levels)
    return from_stored(data, dtype, rows=rows, levels=levels)


# All bit patterns, so that subnormals, the largest numbers and damage come up as often as common ones.
patterns = st.lists(
    st.integers(0, 2**32 - 1), min_size=ROWS * LEVELS * HIDDEN, max_size=ROWS * LEVELS * HIDDEN
)


@settings(deadline=None, max_examples=150)
@given(bits=patterns, dtype=st.sampled_from(DTYPES))
def test_fp8_is_what_exact_arithmetic_says(bits: list[int], dtype: torch.dtype) -> None:
    tensor = bits_to_tensor(bits, dtype).nan_to_num()
    top = 61_440.0 if dtype == torch.float16 else 448 * 2.0**119
    want = [
        [each for level in range(LEVELS) for each in fp8_row(row[level * HIDDEN :][:HIDDEN], top)]
        for row in tensor.tolist()
    ]
    read = round_trip(tensor, FP8)
    assert read.dtype == torch.bfloat16
    assert same_bytes(read.float(), torch.tensor(want))


@settings(deadline=None, max_examples=150)
@given(bits=patterns, dtype=st.sampled_from(DTYPES))
def test_bfloat16_is_the_nearest_value_that_is_finite(bits: list[int], dtype: torch.dtype) -> None:
    tensor = bits_to_tensor(bits, dtype).nan_to_num()
    read = round_trip(tensor, BFLOAT16)
    top = 65_280.0 if dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    plain = tensor.to(torch.bfloat16)
    assert same_bytes(read, torch.where(tensor.abs() > top, plain.sign() * top, plain).to(torch.bfloat16))


@settings(deadline=None, max_examples=200)
@given(bits=patterns, pair=st.sampled_from(NARROWER))
def test_what_is_finite_stays_finite_and_what_is_not_is_seen(
    bits: list[int], pair: tuple[torch.dtype, str]
) -> None:
    tensor = bits_to_tensor(bits, pair[0])
    read = round_trip(tensor, pair[1])
    assert bool(read.isfinite().all()) == bool(tensor.isfinite().all())


@pytest.mark.parametrize(("dtype", "stored"), NARROWER)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_no_number_is_never_hidden(dtype: torch.dtype, stored: str, value: float) -> None:
    tensor = torch.ones(ROWS, LEVELS * HIDDEN, dtype=dtype)
    tensor[1, 5] = value
    read = round_trip(tensor, stored)
    assert read[1, 5].isnan()
    assert read[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_row_never_coarsens_another_nor_a_level_its_neighbour(dtype: torch.dtype) -> None:
    tensor = torch.full((ROWS, LEVELS * HIDDEN), 0.001, dtype=dtype)
    tensor[0, 0], tensor[1, -1] = 30_000, 30_000
    read = round_trip(tensor, FP8).view(ROWS, LEVELS, HIDDEN).float()
    near = torch.isclose(read, torch.tensor(0.001), rtol=0.07).all(dim=-1)
    assert near.tolist() == [[False, True], [True, False], [True, True]]


def test_the_row_of_zeros_keeps_its_signs() -> None:
    zeros = torch.tensor([[0.0, -0.0] * 4] * ROWS)
    assert same_bytes(round_trip(zeros, FP8), zeros.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (info.max, -info.max, info.tiny, info.smallest_normal / 4):
        tensor = torch.full((ROWS, LEVELS * HIDDEN), value, dtype=dtype)
        for stored in (BFLOAT16, FP8):
            read = round_trip(tensor, stored)
            assert torch.isclose(read.double(), tensor.double(), rtol=1 / 8, atol=0).all()
            assert read.to(dtype).isfinite().all()  # also for a decoder of the tower's own dtype


@pytest.mark.parametrize("exponent", [MIN_EXPONENT, -1, 0, MAX_EXPONENT])
def test_every_code_times_every_scale_is_read_exactly(exponent: int) -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    data = torch.tensor([*codes, exponent % 256], dtype=torch.uint8)
    read = from_stored(data, FP8, rows=1, levels=1)
    sizes = [CODE_VALUES[code & 0x7F] * Fraction(2) ** exponent for code in codes]
    want = [-size if code & 0x80 else size for code, size in zip(codes, sizes, strict=True)]
    assert [Fraction(value) for value in read[0].tolist()] == want


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_codes_of_nan_stay_nan(code: int) -> None:
    read = from_stored(torch.tensor([8, code, 0], dtype=torch.uint8), FP8, rows=1, levels=1)
    assert read.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("exponent", [-128, MIN_EXPONENT - 1, MAX_EXPONENT + 1, 127])
def test_a_scale_beyond_its_limits_is_damage(exponent: int) -> None:
    data = torch.tensor([0, 0, 0, exponent % 256], dtype=torch.uint8)
    with pytest.raises(DamagedRecord) as caught:
        from_stored(data, FP8, rows=1, levels=2)
    assert caught.value.cause is DamageCause.NOT_FINITE


@settings(deadline=None, max_examples=200)
@given(data=st.binary(min_size=18, max_size=18))
def test_no_bytes_give_an_infinity(data: bytes) -> None:
    try:
        read = from_stored(torch.frombuffer(bytearray(data), dtype=torch.uint8), FP8, rows=2, levels=3)
    except DamagedRecord:
        return
    assert not read.isinf().any()


@pytest.mark.parametrize("stored", [BFLOAT16, FP8])
def test_many_blocks_are_like_one(stored: str) -> None:
    tensor = torch.randn(700, 3 * 512, generator=torch.Generator().manual_seed(0))
    parts = [round_trip(tensor[start : start + 1], stored, levels=3) for start in range(700)]
    assert same_bytes(round_trip(tensor, stored, levels=3), torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_left_as_it_was(dtype: torch.dtype) -> None:
    tensor = torch.randn(ROWS, LEVELS * HIDDEN).to(dtype)
    before = tensor.clone()
    for stored in (BFLOAT16, FP8):
        round_trip(tensor, stored)
    assert same_bytes(tensor, before)


def test_reading_again_what_was_read_changes_nothing() -> None:
    """A feature that is copied from store to store does not wear out."""
    once = round_trip(torch.randn(50, 64), FP8)
    assert same_bytes(round_trip(once, FP8), once)
