"""Tensors of drawn contents in awkward layouts, the same values on every device: what a found case is written with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def drawn(
    shape: Sequence[int],
    dtype: str = "float32",
    seed: int = 0,
    layout: str = "contiguous",
    *,
    low: int = 0,
    high: int = 2,
    ascending: bool = False,
    spread: float = 1.0,
    special: bool = False,
    requires_grad: bool = False,
    device: str = "cpu",
) -> Tensor:
    """Return a tensor of normal numbers, or of integers in [low, high), or of bools.

    Args:
        dtype: torch's name of it.
        layout: how it lies in memory; one of `LAYOUTS`.
        ascending: integers are sorted along the last axis.
        spread: the standard deviation of normal numbers.
        special: some of the numbers are -inf, -1e9, or a zero of either sign.
    """
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    if kind.is_floating_point:
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * spread
        values = _with_special(values) if special else values
    else:
        values = torch.randint(low, high, tuple(shape), generator=generator)
        values = values.sort().values if ascending else values
    placed = LAYOUTS[layout](values.to(device, kind))
    return placed.requires_grad_() if requires_grad else placed


def _with_special(values: Tensor) -> Tensor:
    flat = values.flatten()
    for every, value in ((5, -math.inf), (7, -1e9), (11, 0.0), (13, -0.0)):
        flat[every - 1 :: every] = value
    return flat.view(values.shape)


def offsets(lengths: Sequence[int], dtype: str = "int32", device: str = "cpu") -> Tensor:
    """Return where sequences of these lengths begin when they are packed, as `cu_seqlens_q` of a call."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, getattr(torch, dtype))


def lengths(numbers: Sequence[int], device: str = "cpu") -> Tensor:
    """Return `kv_lengths` of a call."""
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def _swapped(tensor: Tensor, first: int, second: int) -> Tensor:
    """Return the same values with two axes swapped in memory."""
    if tensor.dim() <= max(first, second):
        return tensor
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _every_second(tensor: Tensor) -> Tensor:
    """Return the same values with a gap behind each; what lies in the gaps must never be seen."""
    wide = tensor.new_full((*tensor.shape, 2), _poison(tensor))
    wide[..., 0] = tensor
    return wide[..., 0]


def _part(tensor: Tensor) -> Tensor:
    """Return the same values inside a larger tensor, at an address that is no multiple of 16 bytes."""
    room = tensor.new_full([size + 3 for size in tensor.shape], _poison(tensor))
    inner = room[tuple(slice(1, 1 + size) for size in tensor.shape)]
    inner.copy_(tensor)
    return inner


def _repeated(axis: int) -> Callable[[Tensor], Tensor]:
    """Return the maker of a tensor that repeats its first entry along an axis with a stride of 0."""

    def repeated(tensor: Tensor) -> Tensor:
        if tensor.dim() <= axis or tensor.shape[axis] == 0:
            return tensor
        return tensor.narrow(axis, 0, 1).clone().expand(tensor.shape)

    return repeated


def _poison(tensor: Tensor) -> float:
    """Return what would show in any result that it reached."""
    return float("nan") if tensor.dtype.is_floating_point else 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "heads inside": lambda tensor: _swapped(tensor, 1, 2),
    "transposed": lambda tensor: _swapped(tensor, tensor.dim() - 2, tensor.dim() - 1) if tensor.dim() > 1 else tensor,
    "every second": _every_second,
    "part": _part,
    "repeated along 0": _repeated(0),
    "repeated along 1": _repeated(1),
    "repeated along 2": _repeated(2),
}
