"""Indexing with traced indices: `table[h, q_idx]`, slices, index tensors, gather, take and embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexgen.capture.call import Call, Context, broadcast_shape
from flexgen.capture.numbers import NeedsConstant, number_node
from flexgen.capture.values import Dim, Indices, Value, scalar_value
from flexgen.capture.views import insert_axis, reshape, select, slice_axis
from flexgen.ir.graph import Node

_INDEX_DTYPES = (torch.int32, torch.int64)


def index_node(context: Context, node: Node) -> Node:
    """Return an index that loads accept: int32 or int64."""
    return node if node.dtype in _INDEX_DTYPES else context.builder.cast(node, torch.int64)


def _check_index(context: Context, index: Value) -> None:
    if index.dtype in (torch.bool, torch.uint8):
        context.refuse(
            f"indexing with a {'bool' if index.dtype == torch.bool else 'uint8'}",
            "torch takes it for a mask, which selects a data-dependent number of elements.",
            "use torch.where, or convert the index with `.long()`.",
        )
    if index.dtype.is_floating_point:
        context.refuse(
            "indexing with a float", "a table is indexed by integers.", "use `//`, or convert the index with `.long()`."
        )


def getitem(context: Context, source: Value, items: Sequence[Any]) -> Value:
    """Return `source[items]` with torch's meaning of ints, slices, None, `...`, 0-d and n-d index tensors.

    A 0-d index tensor selects, as an int does; index tensors of higher rank are numpy's advanced indices.
    """
    expanded = _without_ellipsis(context, source, items)
    axis, advanced = 0, {}
    for item in expanded:
        if item is None:
            source, axis = insert_axis(source, axis), axis + 1
        elif isinstance(item, slice):
            source = slice_axis(context, source, axis, *_slice_bounds(item, source.shape[axis]))
            axis += 1
        elif isinstance(item, Value) and item.dims:
            _check_index(context, item)
            advanced[axis], axis = item, axis + 1
        else:
            source = select(context, source, axis, _scalar_index(context, item, source.dims[axis]))
    return advanced_index(context, source, advanced) if advanced else source


def _without_ellipsis(context: Context, source: Value, items: Sequence[Any]) -> list[Any]:
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if used > len(source.dims):
        raise IndexError(f"too many indices for a tensor of dimension {len(source.dims)}: {used}")
    gaps = [slice(None)] * (len(source.dims) - used)
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    if not places:
        return [*items, *gaps]
    return [*items[: places[0]], *gaps, *items[places[0] + 1 :]]


def _slice_bounds(item: slice, size: int) -> tuple[int, int, int]:
    for bound in (item.start, item.stop, item.step):
        number = number_node(bound)
        if number is not None:
            raise NeedsConstant(number.names)
    start, stop, step = item.indices(size)
    if step <= 0:
        raise ValueError("step must be greater than zero")
    return start, max(start, stop), step


def _scalar_index(context: Context, item: Any, dim: Dim) -> Node:
    number = number_node(item)
    if number is not None:
        return number.expr
    if isinstance(item, Value):
        _check_index(context, item)
        return index_node(context, item.node)
    place = int(item)
    if not -dim.size <= place < dim.size:
        raise IndexError(f"index {place} is out of bounds for a dimension of size {dim.size}")
    return context.builder.index_const(place)


def advanced_index(context: Context, source: Value, indices: dict[int, Value]) -> Value:
    """Return `source` indexed along some axes by broadcast index tensors.

    The broadcast dimensions stand where the indexed axes stood if those are adjacent, else in front (numpy's rule).
    """
    axes = sorted(indices)
    shape = broadcast_shape(*indices.values())
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    front = axes[0] if adjacent else 0
    others = [axis for axis in range(len(source.dims)) if axis not in indices]
    before = [axis for axis in others if adjacent and axis < front]
    context.mark(*(dim for value in indices.values() for dim in value.dims))
    dims = [source.dims[axis] for axis in before] + [Dim(size) for size in shape]
    dims += [source.dims[axis] for axis in others if axis not in before]
    sizes = {axis: context.size_node(source.dims[axis]) for axis in axes}

    def element(at: Indices) -> Node:
        looked_up = at[len(before) : len(before) + len(shape)]
        places = dict(zip(others, [*at[: len(before)], *at[len(before) + len(shape) :]], strict=True))
        for axis, value in indices.items():
            places[axis] = context.builder.wrapped(_element_of(context, value, looked_up), sizes[axis])
        return source.at(tuple(places[axis] for axis in range(len(source.dims))))

    if not dims:
        return scalar_value(element(()))
    return Value(tuple(dims), source.dtype, element, 1 + max(source.depth, *(v.depth for v in indices.values())))


def _element_of(context: Context, value: Value, at: Indices) -> Node:
    """Return the element of a broadcast index tensor."""
    zero = context.builder.index_const(0)
    own = at[len(at) - len(value.dims) :]
    node = value.at(tuple(zero if dim.size == 1 else index for dim, index in zip(value.dims, own, strict=True)))
    return index_node(context, node)


def _index(call: Call) -> Value:
    source: Value = call.args[0]
    indices: list[Value | None] = call.args[1]
    given = {axis: value for axis, value in enumerate(indices) if value is not None}
    for value in given.values():
        _check_index(call.context, value)
    return advanced_index(call.context, source, given)


def _gather(call: Call) -> Value:
    source: Value = call.args[0]
    dim, index = call.integer(call.args[1]), call.args[2]
    axis = dim + len(source.dims) if dim < 0 else dim
    if not source.dims:
        return scalar_value(source.node)
    size = call.context.size_node(source.dims[axis])

    def element(at: Indices) -> Node:
        place = call.builder.wrapped(index_node(call.context, index.at(at)), size)
        return source.at((*at[:axis], place, *at[axis + 1 :]))

    return Value(index.dims, source.dtype, element, 1 + max(source.depth, index.depth))


def _index_select(call: Call) -> Value:
    source, dim, index = call.args[:3]
    return _along(call.context, source, dim, index)


def _along(context: Context, source: Value, dim: int, index: Value) -> Value:
    axis = dim + len(source.dims) if dim < 0 else dim
    flat = index if index.dims else insert_axis(index, 0)
    return advanced_index(context, source, {axis: flat})


def _take(call: Call) -> Value:
    source, index = call.args[:2]
    count = 1
    for size in source.shape:
        count *= size
    flat = source if len(source.dims) == 1 else reshape(call.context, source, (count,))
    return _by_table(call, flat, index)


def _embedding(call: Call) -> Value:
    return _by_table(call, call.args[0], call.args[1])


def _by_table(call: Call, table: Value, index: Value) -> Value:
    """Return rows of the table along axis 0 at an index tensor of any rank."""
    if index.dims:
        return advanced_index(call.context, table, {0: index})
    _check_index(call.context, index)
    return select(call.context, table, 0, index_node(call.context, index.node))


INDEXING: dict[str, Callable[[Call], Value]] = {
    **{"index": _index, "_unsafe_index": _index, "gather": _gather, "index_select": _index_select},
    **{"take": _take, "embedding": _embedding},
}
