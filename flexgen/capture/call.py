"""One aten operation being converted: its arguments as traced values, and what every converter needs to build with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch

from flexgen.capture.builder import NodeBuilder
from flexgen.capture.numbers import NeedsConstant, NumberNode, number_node
from flexgen.capture.refusals import unsupported
from flexgen.capture.stand_in import empty_stand_in
from flexgen.capture.values import Dim, Indices, Refused, Value, is_too_deep, scalar_value
from flexgen.ir.dtypes import fits, is_integer, wrapped
from flexgen.ir.graph import Node, const, make
from flexgen.ir.sizes import SIZE_DTYPE, size_name


@dataclass(slots=True)
class Context:
    """What one trace accumulates.

    Attributes:
        kind: whether a score_mod or a mask_mod is traced.
        builder: makes nodes and records their origins.
        sizes_read: (buffer, dim) of the captured sizes that the result depends on statically.
        gradient_buffers: the captured tensors that require a gradient.
    """

    kind: Literal["score", "mask"]
    builder: NodeBuilder
    sizes_read: set[tuple[str, int]] = field(default_factory=set)
    gradient_buffers: set[str] = field(default_factory=set)

    def mark(self, *dims: Dim) -> None:
        """Note that the result is only right for these sizes."""
        self.sizes_read.update(dim.source for dim in dims if dim.source is not None)

    def size_node(self, dim: Dim) -> Node:
        """Return the size as a node: a run-time scalar for a captured tensor's own dimension."""
        if dim.source is None:
            return const(dim.size, torch.int64)
        return make("scalar", attr=size_name(*dim.source), dtype=SIZE_DTYPE)

    def refuse(self, op: str, why: str | None = None, fix: str | None = None) -> NoReturn:
        origin = self.builder.origin
        raise Refused(unsupported(op, origin.span if origin else None, why, fix))


@dataclass(slots=True)
class Call:
    """One operation.

    Attributes:
        name: the operator's name without namespace and overload, such as `add`.
        overload: such as `Tensor`.
        args: all arguments in schema order, defaults filled in; tensors are `Value`s.
        dtype, shape: of the (first) result, as torch computes them.
    """

    name: str
    overload: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    context: Context

    @property
    def builder(self) -> NodeBuilder:
        return self.context.builder

    def refuse(self, why: str | None = None, fix: str | None = None) -> NoReturn:
        self.context.refuse(self.name, why, fix)

    def integer(self, value: object) -> int:
        """Return a number that decides a shape or an axis; it has to be a constant."""
        node = number_node(value)
        if node is not None:
            raise NeedsConstant(node.names)
        return int(value)  # type: ignore[call-overload,no-any-return]

    def promoted(self, *args: object) -> torch.dtype:
        """Return the dtype in which torch would compare or combine the arguments."""
        dtype = _stand_in(args[0])
        result = torch.result_type(dtype, dtype)
        for arg in args[1:]:
            result = torch.result_type(dtype, _stand_in(arg))
            dtype = _stand_in(Value((), result, _no_element))
        return result

    def operand(self, arg: object, dtype: torch.dtype) -> Value:
        """Return an argument (tensor, number or captured number) as a value of the given dtype."""
        if isinstance(arg, Value):
            return arg if arg.dtype == dtype else convert(self.context, arg, dtype)
        number = number_node(arg)
        if number is not None:
            return scalar_value(self.builder.cast(number.expr, dtype))
        if not isinstance(arg, bool | int | float):
            self.refuse(f"its argument {arg!r} is neither a tensor nor a real number.")
        if is_integer(dtype):
            return scalar_value(const(self._integer_constant(arg, dtype), dtype))
        return scalar_value(const(arg, dtype))

    def _integer_constant(self, arg: bool | int | float, dtype: torch.dtype) -> int:
        """Return a number as torch puts it into an integer dtype: wrapped around."""
        if not (math.isfinite(arg) and fits(int(arg), torch.int64)):
            self.refuse(f"{arg} does not fit an integer.", "convert the tensor to a floating dtype first.")
        return wrapped(int(arg), dtype)

    def pointwise(self, build: Callable[..., Node], *operands: Value) -> Value:
        """Return the value whose elements are `build` of the broadcast operands' elements."""
        return pointwise(self.context, self.dtype, self.shape, build, operands)

    def pointwise_fill(self, value: object) -> Value:
        """Return a tensor of the result's shape that holds one number everywhere."""
        node = self.operand(value, self.dtype).node
        if not self.shape:
            return scalar_value(node)
        return Value(tuple(Dim(size) for size in self.shape), self.dtype, lambda _: node)


def _no_element(indices: Indices) -> Node:
    raise AssertionError(f"a value that stands for a dtype has no elements {indices}")


def _stand_in(arg: object) -> Any:
    """Return something with the arg's dtype and rank class for torch.result_type."""
    if isinstance(arg, Value):
        return empty_stand_in((1,) * len(arg.dims), arg.dtype)
    node = number_node(arg)
    return arg if node is None else node.hint


def hint(arg: object) -> object:
    """Return a plain number for a captured one, anything else unchanged."""
    node: NumberNode | None = number_node(arg)
    return arg if node is None else node.hint


def convert(context: Context, value: Value, dtype: torch.dtype) -> Value:
    """Return the value cast to a dtype; to bool it is a comparison with zero."""
    builder = context.builder

    def build(node: Node) -> Node:
        if dtype == torch.bool and node.dtype != torch.bool:
            return builder.compare("ne", node, const(0, node.dtype))
        return builder.cast(node, dtype)

    return pointwise(context, dtype, value.shape, build, (value,))


def pointwise(
    context: Context, dtype: torch.dtype, shape: Sequence[int], build: Callable[..., Node], operands: Sequence[Value]
) -> Value:
    """Return the elementwise value; a 0-d one is built at once, so that each operation is on the user's line."""
    if not shape:
        node = build(*(operand.node for operand in operands))
        return scalar_value(node)
    dims = _broadcast_dims(context, shape, operands)
    depth = 1 + max((operand.depth for operand in operands), default=0)
    if is_too_deep(depth):
        context.refuse("a long chain on a tensor", "too many operations in a row on a tensor that is not 0-d.")
    builder, origin = context.builder, context.builder.origin

    def element(indices: Indices) -> Node:
        nodes = [operand.at(_operand_indices(operand, indices)) for operand in operands]
        with builder.at(origin):
            return build(*nodes)

    return Value(dims, dtype, element, depth)


def broadcast_shape(*values: Value) -> tuple[int, ...]:
    """Return the shape that the values broadcast to."""
    return tuple(torch.broadcast_shapes(*(value.shape for value in values)))  # type: ignore[no-untyped-call]


def _operand_indices(operand: Value, indices: Indices) -> Indices:
    own = indices[len(indices) - len(operand.dims) :]
    zero = const(0, torch.int64)
    return tuple(zero if dim.size == 1 else index for dim, index in zip(operand.dims, own, strict=True))


def _broadcast_dims(context: Context, shape: Sequence[int], operands: Sequence[Value]) -> tuple[Dim, ...]:
    """Return the result's dimensions, and mark the captured sizes that decide what is broadcast along what."""
    dims = []
    for from_right in range(len(shape), 0, -1):
        present = [operand.dims[-from_right] for operand in operands if len(operand.dims) >= from_right]
        wide = list(dict.fromkeys(dim for dim in present if dim.size == shape[-from_right]))
        context.mark(*(dim for dim in present if dim.size == 1))
        if len(wide) > 1:
            context.mark(*wide)
        dims.append(wide[0])
    return tuple(dims)
