"""How the numbers of a feature are stored: tensor to bytes and back; knows neither records nor stores.

A dtype that is the tensor's own is stored as it is. Two others are narrower:

- **bfloat16**: rounded to the nearest value.
- **float8_e4m3fn** ("fp8"): 4 significant bits, 8 bits a value. The buffer holds the values
  `[token_count, levels * hidden_size]` and behind them one int8 exponent for each row of each level,
  `[token_count, levels]`: a value is its code times two to the exponent (the scale of the OCP
  microscaling formats, E8M0). Each level has a scale of its own because main and DeepStack features
  differ in size by orders of magnitude. Powers of two suffice: e4m3 is a floating-point format itself,
  and they move its range without a rounding of their own. So what is read back is exactly a bfloat16
  tensor, half of whose significant bits are zero.

**Only damage is no number.** The exponent is the smallest that keeps the row's largest absolute value within
448, the largest code. Between the two limits of exponents *every* code times *every* scale is a finite
bfloat16, so that no record, however hostile, gives an infinity; the codes of NaN stay NaN and are seen
in the values. Numbers above a format's range become its largest number: rounding up at the top would
make infinities of what the tower computed, and float16 decoders would see 65,504 as infinite. What was
no number before is NaN afterwards, for no rounding may hide a broken tower (torch's own conversion turns
infinity into 448).

Writing works on blocks of rows: beside tensor and bytes it holds some 3 MiB, however large the tensor is.
Reading fp8 holds bytes and tensor together for the moment of the conversion, and nothing else of size.
"""

from collections.abc import Iterator
from typing import Final

import torch

from shared.features.damage import DamageCause, DamagedRecord
from shared.features.manifest import BFLOAT16, FP8

# Between these, 2**exponent times any code of e4m3 is exactly a finite bfloat16: the smallest code is
# 2**-9 and the smallest bfloat16 2**-133; 448 * 2**119 is the largest 448 * 2**n that float32 can hold.
MIN_EXPONENT: Final = -124
MAX_EXPONENT: Final = 119

_READ_AS: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    BFLOAT16: torch.bfloat16,
    FP8: torch.bfloat16,
}
STORED_DTYPES: Final = frozenset(_READ_AS)

_BLOCK_VALUES: Final = 256 * 1024
_MANTISSA_OF_448: Final = 0.875  # 448 = 0.875 * 2**9


def dtype_name(tensor: torch.Tensor) -> str:
    """What manifests call the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")


def stored_size(dtype: str, *, rows: int, levels: int, hidden_size: int) -> int:
    """Bytes of a stored tensor of `rows` rows of `levels` levels, in plain integers of any size."""
    if dtype == FP8:
        return rows * levels * (hidden_size + 1)
    return rows * levels * hidden_size * _READ_AS[dtype].itemsize


def to_stored(tensor: torch.Tensor, dtype: str, *, levels: int) -> torch.Tensor:
    """The bytes of `[rows, levels * hidden_size]` as one contiguous uint8 tensor.

    `dtype` is the tensor's own (then the bytes are a view of it), "bfloat16" or "float8_e4m3fn".
    """
    tensor = tensor.detach()
    if dtype == dtype_name(tensor):
        return tensor.view(torch.uint8).view(-1)
    return _quantize(tensor, levels) if dtype == FP8 else _round_to_bfloat16(tensor)


def from_stored(data: torch.Tensor, dtype: str, *, rows: int, levels: int) -> torch.Tensor:
    """The tensor `[rows, levels * hidden_size]` of a uint8 buffer of `stored_size` bytes.

    The values of other dtypes than fp8 are a view of the buffer. The tensor may hold what is no number
    if the buffer does; fp8 gives NaN at the most.

    Raises:
        DamagedRecord: an exponent is beyond its limits.
    """
    return _dequantize(data, rows, levels) if dtype == FP8 else data.view(_READ_AS[dtype]).view(rows, -1)


def _round_to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    rounded = torch.empty(tensor.shape, dtype=torch.bfloat16)
    # The largest bfloat16 numbers that are also numbers of float16, and of float32.
    top = 65_280.0 if tensor.dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    for block in _blocks(tensor):
        rows = tensor[block]
        if not rows.abs().amax() <= top:  # or it is NaN
            rows = rows.clamp(-top, top).masked_fill_(rows.isinf(), torch.nan)
        rounded[block] = rows
    return rounded.view(torch.uint8).view(-1)


def _quantize(tensor: torch.Tensor, levels: int) -> torch.Tensor:
    rows, width = tensor.shape
    data = torch.empty(rows * (width + levels), dtype=torch.uint8)
    codes, exponents = _fp8_parts(data, rows, levels)
    top = 61_440.0 if tensor.dtype == torch.float16 else 448 * 2.0**MAX_EXPONENT
    for block in _blocks(tensor):
        values = tensor[block].view(-1, levels, width // levels).float()
        _quantize_block(values, top, codes[block], exponents[block])
    return data


def _quantize_block(values: torch.Tensor, top: float, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """float32 `[rows, levels, hidden_size]` to codes of that shape and exponents `[rows, levels]`."""
    largest = values.abs().amax(dim=-1)  # quicker than aminmax along a dimension
    mantissa, exponent = torch.frexp(largest.clamp(max=top))  # mantissa in [0.5, 1)
    exponent = (exponent - 9 + (mantissa > _MANTISSA_OF_448)).clamp_(MIN_EXPONENT, MAX_EXPONENT)
    scale = _power_of_two(-exponent).masked_fill_(~largest.isfinite(), torch.nan)
    codes.copy_(values.clamp(-top, top).mul_(scale[..., None]))
    exponents.copy_(exponent)


def _dequantize(data: torch.Tensor, rows: int, levels: int) -> torch.Tensor:
    codes, exponents = _fp8_parts(data, rows, levels)
    lowest, highest = exponents.aminmax()
    if lowest < MIN_EXPONENT or highest > MAX_EXPONENT:
        raise DamagedRecord(DamageCause.NOT_FINITE)
    values = codes.to(torch.bfloat16)
    values.mul_(_power_of_two(exponents).to(torch.bfloat16)[..., None])
    return values.view(rows, -1)


def _fp8_parts(data: torch.Tensor, rows: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes `[rows, levels, hidden_size]` and of the exponents `[rows, levels]`."""
    count = data.numel() - rows * levels
    codes, exponents = data[:count].view(torch.float8_e4m3fn), data[count:].view(torch.int8)
    return codes.view(rows, levels, -1), exponents.view(rows, levels)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponent in float32, made of its bits: exact, as no function of powers promises to be."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def _blocks(tensor: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that hold some 256 Ki values each, at least one row."""
    rows, width = tensor.shape
    step = max(1, _BLOCK_VALUES // width)
    return (slice(start, start + step) for start in range(0, rows, step))
