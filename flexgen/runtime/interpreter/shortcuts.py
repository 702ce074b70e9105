"""Shortcuts through Triton's front end for the private copy: the same results, with the repeated work done once.

Interpreting a small tile costs mostly the making of types: each result makes a block type, and each of those makes
several wrapped tuples. Shapes are few, so they are made once each.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class _Shape:
    """What types and tensors of one shape share."""

    __slots__ = ("count", "dimensions", "total", "wrapped")

    def __init__(self, core: Any, sizes: tuple[int, ...], count: int) -> None:
        self.count = count
        self.total = core.constexpr(count)
        self.dimensions = core.tuple(sizes)  # a type's shape
        self.wrapped = core.tuple([core.constexpr(size) for size in sizes])  # a tensor's shape


class _Shapes:
    """The shapes met so far, by their sizes and by the identity of the tuples that stand for them."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._by_sizes: dict[tuple[int, ...], _Shape] = {}
        self._by_identity: dict[int, _Shape] = {}
        self._broadcasts: dict[tuple[int, int], _Shape] = {}
        self.scalar = _Shape(core, (), 1)
        self._by_sizes[()] = self.scalar

    def broadcast(self, lhs: Any, rhs: Any) -> _Shape:
        """Return the shape that two tensors' shapes broadcast to; ValueError when they do not."""
        key = (id(lhs), id(rhs))
        found = self._broadcasts.get(key)
        if found is None:
            sizes = [tuple(size.value for size in shape) for shape in (lhs, rhs)]
            found = self._broadcasts[key] = self.of(np.broadcast_shapes(*sizes))
        return found

    def of(self, shape: Any) -> _Shape:
        found = self._by_identity.get(id(shape))
        return found if found is not None else self._look_up(shape)

    def _look_up(self, shape: Any) -> _Shape:
        constexpr = self._core.constexpr
        plain = shape.value if isinstance(shape, constexpr) else shape
        sizes = tuple(size.value if isinstance(size, constexpr) else size for size in plain)
        found = self._by_sizes.get(sizes)
        if found is None:
            new = _Shape(self._core, sizes, self._core.validate_block_shape(sizes))
            found = self._by_sizes.setdefault(sizes, new)  # one shape a size, whichever thread is first
            for known in (found.dimensions, found.wrapped):  # both live as long as this table, so ids stay theirs
                self._by_identity[id(known)] = found
        return found


def install(core: Any, semantic_class: type) -> type:
    """Make the private copy's types and tensors share their shapes; return a subclass of its semantic to use."""
    shapes = _Shapes(core)
    _install_types(core, shapes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = shapes.of(type.shape) if type.is_block() else shapes.scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape.wrapped, shape.total

    core.tensor.__init__ = init_tensor
    return _make_semantic(core, semantic_class, shapes)


def _install_types(core: Any, shapes: _Shapes) -> None:
    general_equality = core.dtype.__eq__

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = shapes.of(shape)
        if not known.dimensions.values:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.shape, self.numel = element_ty, known.dimensions, known.count

    def equal(self: Any, other: Any) -> bool:
        return self is other or general_equality(self, other)

    core.block_type.__init__ = init_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.__eq__ = lambda self, other: (
        self is other
        or (isinstance(other, core.block_type) and self.shape is other.shape and self.element_ty == other.element_ty)
    )
    core.dtype.__eq__ = equal


def _make_semantic(core: Any, base: Any, shapes: _Shapes) -> type:
    computed_as_is = (core.float32, core.float64, core.int32, core.int64)

    def agree(lhs: Any, rhs: Any) -> bool:
        """Return whether Triton would change neither operand but for their shapes."""
        if lhs is rhs:
            return any(lhs is plain for plain in computed_as_is)
        return lhs.is_ptr() and (rhs is core.int32 or rhs is core.int64)

    def relabel(tensor: Any, shape: _Shape) -> Any:
        """Give a tensor the broadcast shape and leave its array as it is: numpy broadcasts in the operation."""
        if tensor.shape is shape.wrapped or shape is shapes.scalar:
            return tensor
        return core.tensor(tensor.handle, core.block_type(tensor.dtype, shape.dimensions))

    class Semantic(base):  # type: ignore[misc]
        """Triton's semantic with the common case, operands of types that agree, taken first."""

        def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
            if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and agree(lhs.dtype, rhs.dtype):
                shape = shapes.broadcast(lhs.shape, rhs.shape)
                return relabel(lhs, shape), relabel(rhs, shape)
            return super().binary_op_type_checking_impl(lhs, rhs, *args, **options)

        def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
            if lhs.shape is rhs.shape:
                return lhs, rhs
            return super().broadcast_impl_value(lhs, rhs)

    return Semantic
