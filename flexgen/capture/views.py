"""Views, copies and joins of traced tensors: index arithmetic, no computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flexgen.capture.builder import NodeBuilder
from flexgen.capture.call import Call, Context
from flexgen.capture.numbers import number_node
from flexgen.capture.values import Dim, Indices, Value, scalar_value
from flexgen.ir.graph import Node, const


def _view(source: Value, dims: Sequence[Dim], to_source: Callable[[Indices], Indices]) -> Value:
    return Value(
        tuple(dims), source.dtype, lambda indices: source.at(to_source(indices)), source.depth + 1, source.captured
    )


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def select(context: Context, source: Value, axis: int, index: Node) -> Value:
    """Return `source` at an index of one axis; a negative index counts from the end."""
    dim = source.dims[axis]
    size = context.size_node(dim)
    place = context.builder.wrapped(index, size)
    rest = source.dims[:axis] + source.dims[axis + 1 :]
    if not rest:
        return scalar_value(source.at((place,)))
    return _view(source, rest, lambda at: (*at[:axis], place, *at[axis:]))


def slice_axis(context: Context, source: Value, axis: int, start: int, stop: int, step: int) -> Value:
    """Return source[start:stop:step] along an axis, 0 <= start <= stop <= size."""
    dim = source.dims[axis]
    if (start, step) == (0, 1) and stop == dim.size:
        return source
    context.mark(dim)
    dims = (*source.dims[:axis], Dim(max(0, math.ceil((stop - start) / step))), *source.dims[axis + 1 :])
    build = context.builder

    def to_source(at: Indices) -> Indices:
        moved = build.index_add(build.index_mul(at[axis], step), build.index_const(start))
        return (*at[:axis], moved, *at[axis + 1 :])

    return _view(source, dims, to_source)


def insert_axis(source: Value, axis: int) -> Value:
    dims = (*source.dims[:axis], Dim(1), *source.dims[axis:])
    return _view(source, dims, lambda at: (*at[:axis], *at[axis + 1 :]))


def permute(source: Value, order: Sequence[int]) -> Value:
    """Return the value whose axis i is the source's axis order[i]."""
    inverse = [order.index(axis) for axis in range(len(order))]
    return _view(source, [source.dims[axis] for axis in order], lambda at: tuple(at[i] for i in inverse))


def reshape(context: Context, source: Value, shape: Sequence[int]) -> Value:
    """Return the value in another shape with the same number of elements, in row-major order."""
    if source.shape == tuple(shape):
        return source
    kept = [axis for axis, dim in enumerate(source.dims) if dim.size != 1]
    wanted = [axis for axis, size in enumerate(shape) if size != 1]
    if [source.dims[axis].size for axis in kept] == [shape[axis] for axis in wanted]:
        return _change_unit_axes(context, source, shape, dict(zip(kept, wanted, strict=True)))
    context.mark(*source.dims)
    build, sizes = context.builder, source.shape

    def to_source(at: Indices) -> Indices:
        place = build.index_const(0)
        for index, size in zip(at, shape, strict=True):
            place = build.index_add(build.index_mul(place, size), index)
        found: list[Node] = []
        for size in reversed(sizes[1:]):
            place, rest = build.index_divmod(place, size)
            found.append(rest)
        return (place, *reversed(found)) if sizes else ()

    return _finished(_view(source, [Dim(size) for size in shape], to_source))


def _change_unit_axes(context: Context, source: Value, shape: Sequence[int], moved: dict[int, int]) -> Value:
    """Reshape that only adds or drops axes of size 1: indices move, nothing is computed."""
    context.mark(*(dim for dim in source.dims if dim.size == 1))
    dims = [Dim(size) for size in shape]
    for axis, target in moved.items():
        dims[target] = source.dims[axis]
    zero = context.builder.index_const(0)
    rank = len(source.dims)
    return _finished(_view(source, dims, lambda at: tuple(at[moved[i]] if i in moved else zero for i in range(rank))))


def _finished(value: Value) -> Value:
    return value if value.dims else scalar_value(value.node)


def _identity(call: Call) -> Value:
    value: Value = call.args[0]
    return value


def _select(call: Call) -> Value:
    source, dim, index = call.args[:3]
    number = number_node(index)
    node = call.builder.index_const(int(index)) if number is None else number.expr
    return select(call.context, source, _axis(call.integer(dim), len(source.dims)), node)


def _slice(call: Call) -> Value:
    source, dim, start, stop, step = (*call.args, 0, None, None, 1)[:5] if len(call.args) < 5 else call.args
    axis = _axis(call.integer(dim), len(source.dims))
    first, last = (None if bound is None else call.integer(bound) for bound in (start, stop))
    begin, end, stride = slice(first, last, call.integer(step)).indices(source.shape[axis])
    return slice_axis(call.context, source, axis, begin, max(begin, end), stride)


def _transpose(call: Call) -> Value:
    source, first, second = call.args[:3]
    order = list(range(len(source.dims)))
    if order:
        order[first], order[second] = order[second], order[first]
    return permute(source, order)


def _t(call: Call) -> Value:
    source: Value = call.args[0]
    return permute(source, list(reversed(range(len(source.dims)))))


def _permute(call: Call) -> Value:
    source, order = call.args[:2]
    return permute(source, [_axis(axis, len(source.dims)) for axis in order])


def _unsqueeze(call: Call) -> Value:
    source, dim = call.args[:2]
    return insert_axis(source, _axis(dim, len(source.dims) + 1))


def _reshape(call: Call) -> Value:
    if call.overload == "dtype":
        call.refuse("it reads the bits of a value as another dtype.", "convert the value with `.to(dtype)`.")
    return reshape(call.context, call.args[0], call.shape)


def _expand(call: Call) -> Value:
    source: Value = call.args[0]
    own = len(call.shape) - len(source.dims)
    zero = call.builder.index_const(0)
    pairs = list(zip(source.dims, call.shape[own:], strict=True))
    call.context.mark(*(dim for dim, size in pairs if dim.size != size))
    dims = [Dim(size) for size in call.shape[:own]]
    dims += [dim if dim.size == size else Dim(size) for dim, size in pairs]

    def to_source(at: Indices) -> Indices:
        return tuple(zero if dim.size != size else index for (dim, size), index in zip(pairs, at[own:], strict=True))

    return _view(source, dims, to_source)


def _diagonal(call: Call) -> Value:
    source, offset, first, second = (*call.args, 0, 0, 1)[:4] if len(call.args) < 4 else call.args[:4]
    rank, build = len(source.dims), call.builder
    row, column = _axis(first, rank), _axis(second, rank)
    call.context.mark(source.dims[row], source.dims[column])
    others = [axis for axis in range(rank) if axis not in (row, column)]

    def to_source(at: Indices) -> Indices:
        place = dict(zip(others, at[:-1], strict=True))
        place[row] = build.index_add(at[-1], build.index_const(max(-offset, 0)))
        place[column] = build.index_add(at[-1], build.index_const(max(offset, 0)))
        return tuple(place[axis] for axis in range(rank))

    return _view(source, [*(source.dims[axis] for axis in others), Dim(call.shape[-1])], to_source)


def _flip(call: Call) -> Value:
    source, axes = call.args[:2]
    flipped, build = {_axis(axis, len(source.dims)) for axis in axes}, call.builder
    last = {axis: call.context.size_node(source.dims[axis]) for axis in flipped}

    def to_source(at: Indices) -> Indices:
        return tuple(_mirrored(call, last[i], index) if i in flipped else index for i, index in enumerate(at))

    def _mirrored(call: Call, size: Node, index: Node) -> Node:
        distance = build.index_add(index, build.index_const(1))
        if size.op == "const" and distance.op == "const":
            return build.index_const(int(size.attr or 0) - int(distance.attr or 0))
        return build.node("sub", size, distance, dtype=size.dtype)

    return _view(source, source.dims, to_source)


def _repeat(call: Call) -> Value:
    source: Value = call.args[0]
    call.context.mark(*source.dims)
    own, build = len(call.shape) - len(source.dims), call.builder

    def to_source(at: Indices) -> Indices:
        return tuple(build.index_divmod(i, size)[1] for i, size in zip(at[own:], source.shape, strict=True))

    return _view(source, [Dim(size) for size in call.shape], to_source)


def _unbind(call: Call) -> tuple[Value, ...]:
    source, dim = (*call.args, 0)[:2]
    axis = _axis(dim, len(source.dims))
    call.context.mark(source.dims[axis])
    build = call.builder
    return tuple(select(call.context, source, axis, build.index_const(i)) for i in range(source.shape[axis]))


def _split(call: Call) -> tuple[Value, ...]:
    source, sizes, dim = (*call.args, 0)[:3]
    axis = _axis(dim, len(source.dims))
    total = source.shape[axis]
    call.context.mark(source.dims[axis])
    lengths = [min(sizes, total - at) for at in range(0, total, sizes)] if isinstance(sizes, int) else list(sizes)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        slice_axis(call.context, source, axis, start, start + length, 1)
        for start, length in zip(starts, lengths, strict=True)
    )


def _cat(call: Call) -> Value:
    """Join along an axis: an element comes from the part its index falls in."""
    parts, dim = (*call.args, 0)[:2]
    parts = [part for part in parts if part.shape != (0,)]
    axis, context = _axis(dim, len(call.shape)), call.context
    context.mark(*(part.dims[axis] for part in parts))
    values = [call.operand(part, call.dtype) for part in parts]
    ends = [sum(part.shape[axis] for part in parts[: i + 1]) for i in range(len(parts))]
    starts = [0, *ends[:-1]]
    build = call.builder

    def pick(at: Indices, i: int) -> Node:
        moved = build.index_add(at[axis], build.index_const(-starts[i]))
        inside = _clamped(build, moved, ends[i] - starts[i])
        return values[i].at((*at[:axis], inside, *at[axis + 1 :]))

    def element(at: Indices) -> Node:
        index = at[axis]
        if index.op == "const" and isinstance(index.attr, int):
            return pick(at, next(i for i, end in enumerate(ends) if index.attr < end))
        return _pick_by_comparison(call, index, ends, lambda i: pick(at, i))

    depth = 1 + max(value.depth for value in values)
    return Value(tuple(Dim(size) for size in call.shape), call.dtype, element, depth)


def _clamped(build: NodeBuilder, index: Node, size: int) -> Node:
    """Keep an index inside its part: every part is loaded, also where another one is chosen."""
    if index.op == "const":
        return index
    low = build.binary("max", index, const(0, index.dtype))
    return build.binary("min", low, const(size - 1, index.dtype))


def _pick_by_comparison(call: Call, index: Node, ends: Sequence[int], pick: Callable[[int], Node]) -> Node:
    """Return a chain of `where`s over the ends of the parts."""
    build = call.builder
    found = pick(len(ends) - 1)
    for i in reversed(range(len(ends) - 1)):
        is_before = build.compare("lt", index, const(ends[i], index.dtype))
        found = build.where(is_before, pick(i), found)
    return found


def _stack(call: Call) -> Value:
    parts, dim = (*call.args, 0)[:2]
    axis = _axis(dim, len(call.shape))
    joined = Call("cat", "", ([insert_axis(part, axis) for part in parts], axis), call.dtype, call.shape, call.context)
    return _cat(joined)


VIEWS: dict[str, Callable[[Call], Value | tuple[Value, ...]]] = {
    **dict.fromkeys(
        ("alias", "clone", "contiguous", "lift", "lift_fresh", "lift_fresh_copy", "view_of", "positive"), _identity
    ),
    **{"select": _select, "slice": _slice, "transpose": _transpose, "t": _t, "permute": _permute},
    **{"unsqueeze": _unsqueeze, "squeeze": _reshape, "view": _reshape, "_unsafe_view": _reshape, "reshape": _reshape},
    **{"expand": _expand, "diagonal": _diagonal, "flip": _flip, "repeat": _repeat, "unbind": _unbind},
    **{"split": _split, "split_with_sizes": _split, "cat": _cat, "stack": _stack, "_reshape_alias": _reshape},
}
