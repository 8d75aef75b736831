"""Random numbers for sampling that depend on what they are for and on nothing else; knows no probabilities.

Each (seed, sample, place in the answer, token) has its own number, from a hash: the same on every device, in
every batch, after every interruption, and computed for just the tokens that can be chosen.
"""

import hashlib

import torch

# The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 53


def noise(seed: int, sample_index: int, index: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Exponential numbers (float64, mean 1, above 0), one for each of `token_ids` (int64).

    `index` is the place in the answer.
    """
    text = f"{seed}:{sample_index}:{index}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    mixed = _mix(_mix(token_ids * _signed(_STEP) + _signed(key)) ^ _signed(key))
    uniform = (_shifted(mixed, 64 - _BITS) + 0.5).double() * 2.0**-_BITS
    return -uniform.log_()


def _mix(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right without its sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
