"""Reductions and scans of the interpreter: numpy's own where there is one, else the combine function on slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flexgen.runtime.interpreter.builder import Array, NumpyBuilder

Tensors = tuple[Any, ...]


class Reductions:
    """`tl.reduce` and `tl.associative_scan` over numpy arrays.

    A combine function without a numpy counterpart is called on whole slices along the axis, so a reduction costs as
    many calls as the axis is long, whatever the size of the tile.
    """

    def __init__(self, tl: Any, builder: NumpyBuilder) -> None:
        self._tl = tl
        self._builder = builder
        self._reducers = _known(tl, _sum_combine=np.add, _elementwise_max=np.fmax, _elementwise_min=np.fmin)
        self._scanners = _known(tl, _sum_combine=np.add, _prod_combine=np.multiply)

    def reduce(self, inputs: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
        """Stand in for tl.reduce: one tensor in, one out; a tuple in, a tuple out."""
        if not isinstance(inputs, tuple):
            return self.reduce((inputs,), axis, combine_fn, keep_dims)[0]
        axis, keep_dims = _plain(axis), bool(_plain(keep_dims))
        arrays = [self._builder.values(tensor.handle) for tensor in inputs]
        rank = arrays[0].ndim
        if axis is None:
            arrays, along = [array.reshape(-1) for array in arrays], 0
        else:
            along = axis % rank
        results = self._reduce_arrays(inputs, arrays, along, combine_fn)
        shape = _reduced_shape(inputs[0].handle.data.shape, axis, keep_dims)
        return tuple(
            self._tensor(result.reshape(shape), like.dtype) for result, like in zip(results, inputs, strict=True)
        )

    def scan(self, inputs: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        """Stand in for tl.associative_scan."""
        if not isinstance(inputs, tuple):
            return self.scan((inputs,), axis, combine_fn, reverse)[0]
        flip = slice(None, None, -1 if _plain(reverse) else None)
        arrays = [np.moveaxis(self._builder.values(tensor.handle), _plain(axis), 0)[flip] for tensor in inputs]
        results = self._scan_arrays(inputs, arrays, combine_fn)
        restored = [np.moveaxis(result[flip], 0, _plain(axis)) for result in results]
        return tuple(self._tensor(result, like.dtype) for result, like in zip(restored, inputs, strict=True))

    def _reduce_arrays(self, likes: Tensors, arrays: list[Array], axis: int, combine_fn: Any) -> list[Array]:
        known = self._reducers.get(combine_fn)
        if known is not None:
            return [known.reduce(array, axis=axis) for array in arrays]
        slices = [np.moveaxis(array, axis, 0) for array in arrays]
        carry = self._slice(likes, slices, 0)
        for position in range(1, len(slices[0])):
            carry = _as_tuple(combine_fn(*carry, *self._slice(likes, slices, position)))
        return [self._builder.values(tensor.handle) for tensor in carry]

    def _scan_arrays(self, likes: Tensors, arrays: list[Array], combine_fn: Any) -> list[Array]:
        known = self._scanners.get(combine_fn)
        if known is not None:
            return [known.accumulate(array, axis=0, dtype=array.dtype) for array in arrays]
        carry = self._slice(likes, arrays, 0)
        steps = [carry]
        for position in range(1, len(arrays[0])):
            carry = _as_tuple(combine_fn(*carry, *self._slice(likes, arrays, position)))
            steps.append(carry)
        columns = zip(*steps, strict=True)
        return [
            np.stack([self._builder.values(step.handle).reshape(arrays[0].shape[1:]) for step in column])
            for column in columns
        ]

    def _slice(self, likes: Tensors, arrays: list[Array], position: int) -> Tensors:
        return tuple(self._tensor(array[position], like.dtype) for array, like in zip(arrays, likes, strict=True))

    def _tensor(self, values: Array, dtype: Any) -> Any:
        """Return values as a tensor of Triton: a scalar (held as one element) when they have no axis left."""
        if values.ndim == 0:
            return self._tl.tensor(self._builder.wrap(values.reshape(1), dtype), dtype)
        return self._tl.tensor(self._builder.wrap(values, dtype), self._tl.block_type(dtype, list(values.shape)))


def _known(tl: Any, **ufuncs: np.ufunc) -> dict[Callable[..., Any], np.ufunc]:
    """Return the ufunc of each combine function of Triton's standard library; one that a version lacks is skipped."""
    found = {getattr(tl.standard, name, None): ufunc for name, ufunc in ufuncs.items()}
    return {function: ufunc for function, ufunc in found.items() if function is not None}


def _reduced_shape(shape: tuple[int, ...], axis: int | None, keep_dims: bool) -> tuple[int, ...]:
    if axis is None:
        return (1,) * len(shape) if keep_dims else ()
    axis %= len(shape)
    return shape[:axis] + (1,) * keep_dims + shape[axis + 1 :]


def _plain(value: Any) -> Any:
    """Return the value of a tl.constexpr, or the value itself."""
    return getattr(value, "value", value)


def _as_tuple(results: Any) -> Tensors:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
