"""The numpy side of Triton's interpreter: exact bfloat16, IEEE min/max, fast dots, and checked memory accesses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from flexgen.errors import KernelCompileError
from flexgen.runtime.interpreter.memory import bounded_pointer, region_of

Array = np.ndarray[Any, np.dtype[Any]]


def widen_bfloat16(bits: Array) -> Array:
    """Return the float32 values of bfloat16s that are stored as uint16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bfloat16(values: Array) -> Array:
    """Return float values rounded to bfloat16, nearest even, stored as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


class Value:
    """A value of an interpreted kernel: an array, and Triton's scalar or pointer type of its elements.

    Stands in for the interpreter's own handle, which checks the array's item size each time one is made.
    """

    __slots__ = ("attr", "data", "dtype")

    def __init__(self, data: Array, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr

    def __bool__(self) -> bool:
        return bool(self.data.all())

    def get_element_ty(self) -> Any:
        element = self.dtype
        while hasattr(element, "element_ty"):
            element = element.element_ty
        return element

    def clone(self) -> Value:
        return Value(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        self.attr[key] = value


class GridPosition(threading.local):
    """The running program's index and the grid's extent, one of each a thread."""

    index: tuple[int, int, int] = (0, 0, 0)
    extent: tuple[int, int, int] = (1, 1, 1)


class NumpyBuilder:
    """Overrides of Triton's InterpreterBuilder, mixed in before it; stateless but for the thread's grid position.

    bfloat16 is stored as uint16 there; every operation here computes it in float32 and rounds to nearest even, as the
    hardware does. `tl` is the private copy of triton.language.
    """

    tl: Any
    interpreter: Any
    memory: Any  # Triton's C++ loads, stores and atomics on arrays of addresses

    def bind(self, tl: Any, interpreter: Any) -> None:
        """Remember the modules whose classes the operations make, and tables derived from them."""
        self.tl, self.interpreter, self.memory = tl, interpreter, interpreter._interpreter
        interpreter.TensorHandle = Value
        self.position = GridPosition()

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        """Where the inherited device_print says it is."""
        return self.position.index

    def create_get_program_id(self, axis: int) -> Any:
        return Value(np.array([self.position.index[axis]], dtype=np.int32), self.tl.int32)

    def create_get_num_programs(self, axis: int) -> Any:
        return Value(np.array([self.position.extent[axis]], dtype=np.int32), self.tl.int32)

    # Values in and out of numpy.

    def values(self, handle: Any) -> Array:
        """Return an operand's values in a dtype that numpy computes in."""
        data: Array = handle.data
        return widen_bfloat16(data) if handle.dtype.scalar == self.tl.bfloat16 else data

    def wrap(self, values: Array, dtype: Any) -> Any:
        """Return values as a handle of Triton's scalar type `dtype`, rounded to it; comparisons stay bool."""
        if values.dtype == np.bool_:
            return Value(values, self.tl.int1)
        if dtype == self.tl.bfloat16:
            return Value(narrow_bfloat16(values), dtype)
        return Value(values.astype(self.interpreter._get_np_dtype(dtype), copy=False), dtype)

    def get_bf16(self, value: float) -> Any:
        return Value(narrow_bfloat16(np.array([value], dtype=np.float32)), self.tl.bfloat16)

    # Elementwise.

    def get_all_ones_value(self, type_: Any) -> Any:
        """Return the number of all bits set, of which Triton's own raises where the type is unsigned."""
        return self.wrap(np.full(1, -1).astype(self.interpreter._get_np_dtype(type_)), type_.scalar)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return self.wrap(op(self.values(arg)), arg.dtype.scalar)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        return self.wrap(op(self.values(lhs), self.values(rhs)), lhs.dtype.scalar)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan == self.tl.PropagateNan.ALL:
            return self.create_minimumf(self.create_maximumf(arg, low), high)  # type: ignore[attr-defined]
        return self.create_minnumf(self.create_maxnumf(arg, low), high)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.wrap(self.values(x) * self.values(y) + self.values(z), z.dtype.scalar)

    def create_select(self, condition: Any, lhs: Any, rhs: Any) -> Any:
        return Value(np.where(condition.data, lhs.data, rhs.data), lhs.dtype.scalar)

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda values: torch.erf(torch.from_numpy(np.ascontiguousarray(values))).numpy())

    def create_rsqrt(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda values: np.reciprocal(np.sqrt(values)))

    # Conversions.

    def cast_impl(self, source: Any, target_type: Any) -> Any:
        return self.wrap(self._as_target(source, target_type.scalar), target_type.scalar)

    def _as_target(self, source: Any, scalar_type: Any) -> Array:
        values = self.values(source)
        if values.dtype == np.bool_ and scalar_type != self.tl.int1:
            return values.astype(np.uint8)  # else `wrap` takes it for the result of a comparison
        return values

    def create_bitcast(self, source: Any, target_type: Any) -> Any:
        scalar, region = target_type.scalar, region_of(source.dtype.scalar)
        if scalar.is_ptr() and region is not None:
            scalar = bounded_pointer(self.tl.pointer_type, scalar.element_ty, region)
        return Value(source.data.view(self.interpreter._get_np_dtype(scalar)), scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # Matrix products and shapes.

    def create_dot(self, a: Any, b: Any, accumulator: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(self._dot_operand(a), self._dot_operand(b))
        return self.wrap(product + self.values(accumulator), accumulator.dtype.scalar)

    def _dot_operand(self, handle: Any) -> Array:
        """Return an operand as float32, float64 or int32: products are exact there, and BLAS takes the floats."""
        scalar = handle.dtype.scalar
        if scalar.is_int():
            return handle.data.astype(np.int32)  # type: ignore[no-any-return]
        if scalar.is_fp8():
            handle = self.create_fp_to_fp(handle, self.tl.float16, None)  # type: ignore[attr-defined]
        values = self.values(handle)
        return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)

    def create_splat(self, result_type: Any, arg: Any) -> Any:
        shape, data = tuple(result_type.shape), np.ascontiguousarray(arg.data)
        # A view of the one element; np.broadcast_to would make the same one, at ten times the cost.
        return Value(np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape)), arg.dtype.scalar)

    # Memory. Triton's C++ reads its arrays as if they were contiguous, which broadcast views are not.

    # The hints that follow (caching, eviction, volatile) mean nothing here, and each version of Triton has its own.

    def create_load(self, pointers: Any, *hints: Any) -> Any:
        return self.create_masked_load(pointers, _everywhere(pointers), None)

    def create_masked_load(self, pointers: Any, mask: Any, other: Any, *hints: Any, **named_hints: Any) -> Any:
        active = _mask_of(mask)
        self._check(pointers, active)
        element_type = pointers.get_element_ty()
        dtype = self.interpreter._get_np_dtype(element_type)
        filler = np.zeros(pointers.data.shape, dtype) if other is None else np.ascontiguousarray(other.data)
        addresses = np.ascontiguousarray(pointers.data)
        return Value(self.memory.load(addresses, active, filler, dtype), element_type)

    def create_store(self, pointers: Any, value: Any, *hints: Any) -> Any:
        return self.create_masked_store(pointers, value, _everywhere(pointers))

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *hints: Any, **named_hints: Any) -> Any:
        active = _mask_of(mask)
        self._check(pointers, active)
        return self.memory.store(np.ascontiguousarray(pointers.data), np.ascontiguousarray(value.data), active)

    def create_atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        active = _mask_of(mask)
        self._check(pointers, active)
        operands = _contiguous(pointers), _contiguous(value), Value(active, mask.dtype)
        return super().create_atomic_rmw(op, *operands, sem, scope)  # type: ignore[misc]

    def create_atomic_cas(self, pointers: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        self._check(pointers, _everywhere(pointers))
        operands = _contiguous(pointers), _contiguous(compare), _contiguous(value)
        return super().create_atomic_cas(*operands, sem, scope)  # type: ignore[misc]

    def _check(self, pointers: Any, active: Array) -> None:
        region = region_of(pointers.dtype.scalar)
        if region is None:
            raise KernelCompileError(
                "a kernel made a pointer from a number", why="the interpreter cannot bound its accesses"
            )
        element_bits = pointers.get_element_ty().primitive_bitwidth
        region.check(pointers.data[active], max(element_bits // 8, 1))


def _everywhere(pointers: Any) -> Array:
    return np.ones(pointers.data.shape, dtype=np.bool_)


def _mask_of(mask: Any) -> Array:
    data = mask if isinstance(mask, np.ndarray) else mask.data  # descriptors pass plain arrays
    return np.ascontiguousarray(data, dtype=np.bool_)


def _contiguous(value: Any) -> Value:
    return Value(np.ascontiguousarray(value.data), value.dtype)
