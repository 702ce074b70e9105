"""Small static reductions, unrolled: sums, products, extrema, any/all, and products of vectors and matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from flexgen.capture.call import Call, broadcast_shape, convert, pointwise
from flexgen.capture.values import MAX_TERMS, Dim, Indices, Refused, Value, scalar_value
from flexgen.capture.views import insert_axis, permute
from flexgen.errors import CaptureError
from flexgen.ir.graph import Node, const

Reducer = Callable[[Call], Value | tuple[Value, ...]]

_ACCUMULATE_IN_FLOAT = (torch.bfloat16, torch.float16)


def _axes(call: Call, dims: object, rank: int) -> tuple[int, ...]:
    given = [call.integer(axis) for axis in (dims if isinstance(dims, list | tuple) else [dims]) if axis is not None]
    return tuple(sorted({axis % rank for axis in given})) if given else tuple(range(rank))


def _fold(terms: Sequence[Node], combine: Callable[[Node, Node], Node]) -> Node:
    """Combine pairwise: a shallow tree is more exact and shorter to wait for than a chain."""
    while len(terms) > 1:
        pairs = [combine(*terms[i : i + 2]) for i in range(0, len(terms) - 1, 2)]
        terms = pairs + ([terms[-1]] if len(terms) % 2 else [])
    return terms[0]


def _check_size(call: Call, source: Value, axes: Sequence[int]) -> None:
    count = math.prod(source.shape[axis] for axis in axes)
    if count > MAX_TERMS:
        _refuse_size(call, count)
    if count == 0:
        call.refuse("it reduces a dimension of size 0.")


def _refuse_size(call: Call, count: int) -> None:
    where = call.builder.origin.span if call.builder.origin else None
    raise Refused(
        CaptureError(
            f"reduction of size {count} not supported in {call.context.kind}_mod",
            where=where,
            why=f"reductions are unrolled in the kernel, up to {MAX_TERMS} terms.",
            fix="reduce outside the mod, capture the result and index it; or append the rows to query and key.",
        )
    )


def reduce(
    call: Call, source: Value, axes: Sequence[int], keepdim: bool, combine: Callable[[Node, Node], Node]
) -> Value:
    """Return the source with some axes reduced; each element is the unrolled expression."""
    call.context.mark(*(source.dims[axis] for axis in axes))
    _check_size(call, source, axes)
    builder, origin = call.builder, call.builder.origin
    kept = [axis for axis in range(len(source.dims)) if axis not in axes]
    steps = [tuple(builder.index_const(i) for i in range(source.shape[axis])) for axis in axes]

    def element(at: Indices) -> Node:
        outer = [at[axis] for axis in kept] if keepdim else at
        fixed = dict(zip(kept, outer, strict=True))
        terms = []
        for step in itertools.product(*steps):
            place = fixed | dict(zip(axes, step, strict=True))
            terms.append(source.at(tuple(place[axis] for axis in range(len(source.dims)))))
        with builder.at(origin):
            return _fold(terms, combine)

    if keepdim:
        dims = tuple(Dim(1) if axis in axes else dim for axis, dim in enumerate(source.dims))
    else:
        dims = tuple(source.dims[axis] for axis in kept)
    if not dims:
        return scalar_value(element(()))
    return Value(dims, source.dtype, element, source.depth + 1)


def _combiner(call: Call, op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: call.builder.binary(op, a, b)


def _dims_and_keepdim(call: Call) -> tuple[object, bool]:
    """Return the `dim` and `keepdim` arguments, for whole-tensor overloads all axes and False."""
    takes_dims = call.name in ("amax", "amin") or (len(call.args) > 1 and isinstance(call.args[1], list))
    if call.overload == "default" and not takes_dims:
        return None, False
    dims, keepdim = (*call.args[1:], None, False)[:2] if len(call.args) < 3 else call.args[1:3]
    return dims, bool(keepdim)


def _total(call: Call, source: Value, op: str) -> Value:
    dims, keepdim = _dims_and_keepdim(call)
    return reduce(call, source, _axes(call, dims, len(source.dims)), keepdim, _combiner(call, op))


def _accumulated(call: Call, op: str) -> Value:
    """Sum or multiply in the result's dtype; halves in float32, as torch does."""
    dtype = torch.float32 if call.dtype in _ACCUMULATE_IN_FLOAT else call.dtype
    total = _total(call, convert(call.context, call.args[0], dtype), op)
    return convert(call.context, total, call.dtype)


def _sum(call: Call) -> Value:
    return _accumulated(call, "or" if call.dtype == torch.bool else "add")


def _prod(call: Call) -> Value:
    return _accumulated(call, "and" if call.dtype == torch.bool else "mul")


def _mean(call: Call) -> Value:
    source: Value = call.args[0]
    dims, _ = _dims_and_keepdim(call)
    count = math.prod(source.shape[axis] for axis in _axes(call, dims, len(source.dims)))
    total = _accumulated(call, "add")
    return pointwise(
        call.context, call.dtype, total.shape, lambda x: call.builder.binary("div", x, const(count, x.dtype)), (total,)
    )


def _variance(call: Call) -> Value:
    """Return the variance with a correction: the sum of squared deviations over (count - correction)."""
    source, dims, correction, keepdim = call.args[:4]
    axes = _axes(call, dims, len(source.dims))
    count = math.prod(source.shape[axis] for axis in axes)
    freedom = max(0, count - (1 if correction is None else call.integer(correction)))
    total = reduce(call, source, axes, True, _combiner(call, "add"))

    def squared(x: Node, s: Node) -> Node:
        distance = call.builder.binary("sub", x, call.builder.binary("div", s, const(count, s.dtype)))
        return call.builder.binary("mul", distance, distance)

    deviations = pointwise(call.context, call.dtype, source.shape, squared, (source, total))
    spread = reduce(call, deviations, axes, keepdim, _combiner(call, "add"))
    over = call.operand(float(freedom), call.dtype)
    return pointwise(call.context, call.dtype, spread.shape, _combiner(call, "div"), (spread, over))


def _extremum(op: str) -> Reducer:
    logical = {"max": "or", "min": "and"}

    def extremum(call: Call) -> Value | tuple[Value, ...]:
        source: Value = call.args[0]
        if call.overload == "other":
            operands = [call.operand(arg, call.dtype) for arg in call.args[:2]]
            return call.pointwise(_combiner(call, op), *operands)
        total = _total(call, source, logical[op] if source.dtype == torch.bool else op)
        if call.overload == "dim":
            return total, _unknown_position(call, total)
        return total

    return extremum


def _unknown_position(call: Call, total: Value) -> Value:
    """Return the second result of `max(dim)`: the position, refused when it is used."""
    context, origin = call.context, call.builder.origin

    def element(_: Indices) -> Node:
        with context.builder.at(origin):
            context.refuse(f"the position of the {call.name}imum", "only its value is compiled.")

    return Value(total.dims, torch.int64, element)  # built when used, so that an unused position is no error


def _truth(op: str) -> Reducer:
    return lambda call: _total(call, convert(call.context, call.args[0], torch.bool), op)


def _product(call: Call, left: Value, right: Value, axis: int) -> Value:
    """Return sum over `axis` of left * right, broadcast; halves in float32, as torch does."""
    dtype = torch.float32 if call.dtype in _ACCUMULATE_IN_FLOAT else call.dtype
    operands = (call.operand(left, dtype), call.operand(right, dtype))
    shape = broadcast_shape(left, right)
    terms = pointwise(call.context, dtype, shape, _combiner(call, "mul"), operands)
    total = reduce(call, terms, (axis,), False, _combiner(call, "add"))
    return convert(call.context, total, call.dtype)


def _dot(call: Call) -> Value:
    return _product(call, call.args[0], call.args[1], 0)


def _mv(call: Call) -> Value:
    return _product(call, call.args[0], insert_axis(call.args[1], 0), 1)


def _mm(call: Call) -> Value:
    left, right = call.args[:2]
    rank = len(left.dims)
    order = [*range(rank - 2), rank - 1, rank - 2]
    return _product(call, insert_axis(left, rank - 1), insert_axis(permute(right, order), rank - 2), rank)


def _bucketize(call: Call) -> Value:
    values, boundaries, _, right = call.args[:4]
    return _rank(call, boundaries, values, bool(right))


def _searchsorted(call: Call) -> Value:
    boundaries, values, _, right, side = call.args[:5]
    return _rank(call, boundaries, values, bool(right) or side == "right")


def _rank(call: Call, boundaries: Value, values: object, right: bool) -> Value:
    """Return how many boundaries lie below each value (or are equal to it, with `right`)."""
    if len(boundaries.dims) != 1:
        call.refuse("the boundaries are not a vector.")
    dtype = call.promoted(boundaries, values)
    one_by_one = insert_axis(call.operand(values, dtype), len(call.shape))
    op = "le" if right else "lt"
    is_below = pointwise(
        call.context,
        call.dtype,
        (*call.shape, boundaries.shape[0]),
        lambda bound, value: call.builder.cast(call.builder.compare(op, bound, value), call.dtype),
        (call.operand(boundaries, dtype), one_by_one),
    )
    return reduce(call, is_below, (len(call.shape),), False, _combiner(call, "add"))


REDUCTIONS: dict[str, Reducer] = {
    **{"sum": _sum, "prod": _prod, "mean": _mean, "any": _truth("or"), "all": _truth("and")},
    **{"max": _extremum("max"), "min": _extremum("min"), "amax": _extremum("max"), "amin": _extremum("min")},
    **{"bucketize": _bucketize, "searchsorted": _searchsorted},
    **{"var": _variance, "dot": _dot, "vdot": _dot, "mv": _mv, "mm": _mm, "bmm": _mm},
}
