"""Sums of floating-point values as 64-bit integers: the same to the last bit in any order of additions."""

from __future__ import annotations

import torch

BITS = 62  # of a sum's magnitude
LARGEST_EXPONENT = 126  # a float32 scale stays normal


def scale_for(largest: torch.Tensor, count: int) -> torch.Tensor:
    """Return the power of two by which values are multiplied before they are rounded to integers.

    Args:
        largest: 0-d, the largest magnitude among the values.
        count: at most how many meet in one sum, which then cannot overflow.
    """
    room = BITS - max(count - 1, 0).bit_length()
    exponent = room - torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))


def to_float(total: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return sums as float64; NaN everywhere if a value was infinite or NaN."""
    return torch.where(largest.isfinite(), total.double() / scale.double(), torch.nan)
