"""What the IR knows of torch's dtypes: their names, families, ranges, and which conversions lose nothing."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch.utils._mode_utils import no_dispatch

_ALL = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


DTYPES: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in _ALL}

# The dtypes that torch computes with; the others only store.
ARITHMETIC_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether the dtype is an integer; bool is not."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


@functools.cache
def integer_limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest value of an integer dtype, or of bool."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def fits(value: int, dtype: torch.dtype) -> bool:
    """Whether the number is a value of the integer dtype, or of bool."""
    low, high = integer_limits(dtype)
    return low <= value <= high


def wrapped(value: int, dtype: torch.dtype) -> int:
    """Return the value of an integer dtype that is equal modulo the number of its values."""
    low, high = integer_limits(dtype)
    return (value - low) % (high - low + 1) + low


@functools.cache
def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target`."""
    if source == target:
        return True
    if source.is_floating_point:
        return target.is_floating_point and _float_fits(source, target)
    low, high = integer_limits(source)
    if target.is_floating_point:
        bound = max(-low, high)
        return bound <= 2 ** _digits(target) and bound <= torch.finfo(target).max
    target_low, target_high = integer_limits(target)
    return target_low <= low and high <= target_high


def _digits(dtype: torch.dtype) -> int:
    """Return the number of bits of a float's significand, the hidden one included."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _float_fits(source: torch.dtype, target: torch.dtype) -> bool:
    inner, outer = torch.finfo(source), torch.finfo(target)
    least_inner, least_outer = inner.smallest_normal * inner.eps, outer.smallest_normal * outer.eps
    return _digits(source) <= _digits(target) and inner.max <= outer.max and least_inner >= least_outer


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Let operations work on real tensors although the caller's thread may be under fake tensors or another mode."""
    with torch._C.DisableTorchFunction(), no_dispatch():
        yield


@functools.cache
def _round_to(value: float, dtype: torch.dtype) -> float:
    with plain_tensors():
        return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype).item())


def shortest(value: float, dtype: torch.dtype) -> float:
    """Return the float with the fewest digits that rounds to `value` in `dtype` (0.3, not 0.30000001192092896)."""
    if not math.isfinite(value) or value == 0.0:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((short for short in candidates if _round_to(short, dtype) == value), value)


def is_representable(value: float, dtype: torch.dtype) -> bool:
    """Whether the float is exactly a value of `dtype`; NaN is not."""
    return _round_to(value, dtype) == value
