"""Tensors made inside a mod: filled ones, and small tables of constants."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch

from flexgen.capture.builder import constant_index
from flexgen.capture.call import Call, Context
from flexgen.capture.values import MAX_TERMS, Dim, Indices, Value, filled, scalar_value
from flexgen.ir.graph import Node, const


def _filled(position: int) -> Callable[[Call], Value]:
    """Return the converter of a `full`-like operation whose fill value is argument `position`."""

    def full(call: Call) -> Value:
        return call.pointwise_fill(call.args[position])

    return full


def _filled_with(value: int) -> Callable[[Call], Value]:
    return lambda call: call.pointwise_fill(value)


CREATION: dict[str, Callable[[Call], Value]] = {
    **{"full_like": _filled(1), "full": _filled(1), "new_full": _filled(2), "scalar_tensor": _filled(0)},
    **{name: _filled_with(0) for name in ("zeros_like", "new_zeros", "empty_like", "new_empty", "zeros", "empty")},
    **{name: _filled_with(1) for name in ("ones_like", "new_ones", "ones")},
}


def constant(context: Context, tensor: torch.Tensor) -> Value:
    """Return a tensor that the mod made from constants (`torch.tensor([...])`, `torch.arange(n)`) as a value.

    An arithmetic progression of one axis is computed from the index; another table is a chain of `where`s.
    """
    dims = tuple(Dim(size) for size in tensor.shape)
    if tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all()):
        return filled(tensor.shape, tensor.flatten()[0].item(), tensor.dtype)
    if tensor.dim() == 0:
        return scalar_value(const(tensor.item(), tensor.dtype))
    progression = _progression(tensor)
    if progression is not None:
        start, step = progression
        builder = context.builder

        def element(at: Indices) -> Node:
            place = builder.index_add(builder.index_mul(at[0], step), builder.index_const(start))
            return builder.cast(place, tensor.dtype)

        return Value(dims, tensor.dtype, element)
    return Value(dims, tensor.dtype, _table(context, tensor))


def _progression(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return (start, step) of a 1-d integer tensor that is an arithmetic progression."""
    if tensor.dim() != 1 or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        return None
    wide = tensor.to(torch.int64)
    step = int(wide[1] - wide[0])
    return (int(wide[0]), step) if bool((wide.diff() == step).all()) else None


def _table(context: Context, tensor: torch.Tensor) -> Callable[[Indices], Node]:
    shape = tuple(tensor.shape)

    def element(at: Indices) -> Node:
        free = [axis for axis, index in enumerate(at) if index.op != "const"]
        if math.prod(shape[axis] for axis in free) > MAX_TERMS:
            context.refuse(
                f"a table of {math.prod(shape)} constants made inside the mod",
                f"it is looked up by comparisons, up to {MAX_TERMS} of them.",
                "make the tensor outside the mod, so that it is captured, and index it.",
            )
        return _looked_up(context, tensor, at, free)

    return element


def _looked_up(context: Context, tensor: torch.Tensor, at: Indices, free: list[int]) -> Node:
    builder = context.builder
    ranges = [range(size) if axis in free else (constant_index(at[axis]),) for axis, size in enumerate(tensor.shape)]
    found: Node | None = None
    for place in reversed(list(itertools.product(*ranges))):
        value = const(tensor[place].item(), tensor.dtype)
        tests = [builder.compare("eq", at[axis], const(place[axis], at[axis].dtype)) for axis in free]
        condition = functools.reduce(lambda left, right: builder.binary("and", left, right), tests) if tests else None
        found = value if found is None or condition is None else builder.where(condition, value, found)
    if found is None:
        context.refuse("indexing an empty tensor")
    return found
