"""Evaluation of a graph on torch tensors: the meaning of the IR, and the oracle of the tests."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen.ir.dtypes import is_lossless, plain_tensors
from flexgen.ir.graph import Graph, Node
from flexgen.ir.sizes import split_size_name


@dataclass(frozen=True, slots=True)
class _Environment:
    """What the leaves read, and where and in which dtype values are computed."""

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    promote_float: torch.dtype | None = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of the IR's `dtype` are held."""
        promoted = self.promote_float
        return promoted if promoted and dtype.is_floating_point and is_lossless(dtype, promoted) else dtype

    def device(self) -> torch.device:
        tensors = (*self.inputs.values(), *self.buffers.values())
        return tensors[0].device if tensors else torch.device("cpu")

    def number(self, value: object, dtype: torch.dtype) -> Tensor:
        """Return a 0-d tensor, filled on its device: a copy from the host could not be captured in a CUDA graph."""
        return torch.full((), value, dtype=self.dtype(dtype), device=self.device())  # type: ignore[call-overload,no-any-return]


Evaluator = Callable[[_Environment, Node, tuple[Tensor, ...]], Tensor]


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    scalars: Mapping[str, int | float],
    *,
    promote_float: torch.dtype | None = None,
) -> Tensor:
    """Evaluate a graph with the meaning that emitted kernels have.

    A load outside its buffer is 0. Division of an integer by zero, undefined in kernels, is 0. `pow` is that of
    torch for a number as the exponent: in float32 and float64 exactly x * x for 2, sqrt(x) for 0.5, and so on.

    Args:
        inputs: for each input that the graph uses, a tensor; they broadcast against each other.
        buffers: the captured tensors, by name; gradients flow through loads.
        scalars: the captured numbers, by name; sizes of buffers are read off the buffers.
        promote_float: hold every floating value in this dtype and round only where a `cast` narrows one
            floating dtype to another. Constants then keep all digits that the user wrote.

    Returns:
        A tensor of the root's dtype (promoted), broadcast over only those inputs that the root depends on.
    """
    environment = _Environment(inputs, buffers, scalars, promote_float)
    nodes = list(graph.nodes())
    pending_uses = Counter(arg for node in nodes for arg in node.args)
    values: dict[Node, Tensor] = {}
    for node in nodes:
        values[node] = EVALUATORS[node.op](environment, node, tuple(values[arg] for arg in node.args))
        pending_uses.subtract(node.args)
        for arg in node.args:
            if pending_uses[arg] == 0:
                values.pop(arg, None)  # a score-sized value is large
    return values[graph.root]


def evaluate_constant(node: Node) -> int | float | bool:
    """Return the value of a node all of whose arguments are constants, in the node's own dtype."""
    environment = _Environment()
    with plain_tensors():
        args = tuple(environment.number(arg.attr, arg.dtype) for arg in node.args)
        value = EVALUATORS[node.op](environment, node, args).item()
    assert isinstance(value, int | float)
    return value


def _input(environment: _Environment, node: Node, _: tuple[Tensor, ...]) -> Tensor:
    return environment.inputs[str(node.attr)].to(environment.dtype(node.dtype))


def _const(environment: _Environment, node: Node, _: tuple[Tensor, ...]) -> Tensor:
    return environment.number(node.attr, node.dtype)


def _scalar(environment: _Environment, node: Node, _: tuple[Tensor, ...]) -> Tensor:
    size = split_size_name(node.attr)
    value = environment.buffers[size[0]].shape[size[1]] if size else environment.scalars[str(node.attr)]
    return environment.number(value, node.dtype)


def _load(environment: _Environment, node: Node, indices: tuple[Tensor, ...]) -> Tensor:
    buffer = environment.buffers[str(node.attr)]
    dtype = environment.dtype(node.dtype)
    if not indices:
        return buffer.to(dtype)
    in_range = [(index >= 0) & (index < size) for index, size in zip(indices, buffer.shape, strict=True)]
    inside = functools.reduce(torch.logical_and, in_range)
    zero = torch.zeros((), dtype=dtype, device=buffer.device)
    if buffer.numel() == 0:
        return zero.expand(inside.shape)
    loaded = buffer[tuple(torch.where(inside, index.long(), 0) for index in indices)].to(dtype)
    return torch.where(inside, loaded, zero)


def _cast(environment: _Environment, node: Node, args: tuple[Tensor, ...]) -> Tensor:
    source = node.args[0].dtype
    held = environment.dtype(node.dtype)
    narrows = source.is_floating_point and node.dtype.is_floating_point and not is_lossless(source, node.dtype)
    return args[0].to(node.dtype).to(held) if narrows else args[0].to(held)


def _plain(function: Callable[..., Tensor]) -> Evaluator:
    """Return the row of an op that torch has under the same meaning."""
    return lambda environment, node, args: function(*args)


def _rounding_division(
    divide: Callable[[Tensor, Tensor], Tensor], by_minus_one: Callable[[Tensor], Tensor]
) -> Evaluator:
    """Return the row of a division; by 0, and of the least integer by -1, the processor itself would trap."""

    def row(_: _Environment, node: Node, args: tuple[Tensor, ...]) -> Tensor:
        dividend, divisor = args
        if node.dtype.is_floating_point:
            return divide(dividend, divisor)
        is_zero, is_minus_one = divisor == 0, divisor == (-1 if divisor.dtype.is_signed else 0)
        quotient = divide(dividend, torch.where(is_zero | is_minus_one, torch.ones_like(divisor), divisor))
        quotient = torch.where(is_minus_one, by_minus_one(dividend), quotient)
        return torch.where(is_zero, torch.zeros_like(quotient), quotient)

    return row


# Exponents for which torch's kernel for `tensor ** number` computes something else than the power function. In
# the narrow dtypes the power function is computed in float32 and rounds to the same for 2 and -1.
_WIDE_FLOATS = (torch.float32, torch.float64)
_EXACT_POWERS: tuple[tuple[float, Callable[[Tensor], Tensor]], ...] = (
    (2.0, lambda base: base * base),
    (3.0, lambda base: base * base * base),
    (-1.0, lambda base: 1.0 / base),
    (0.5, torch.sqrt),
    (-0.5, torch.rsqrt),
)


def _pow(base: Tensor, exponent: Tensor) -> Tensor:
    result = torch.pow(base, exponent)
    if base.dtype not in _WIDE_FLOATS or exponent.requires_grad:
        return result
    for value, function in _EXACT_POWERS:
        matches = exponent == value
        if matches.all():
            return function(base)  # without `where`, through which a NaN would reach the gradient
        if matches.any():
            result = torch.where(matches, function(base), result)
    return result


EVALUATORS: dict[str, Evaluator] = {
    "input": _input,
    "const": _const,
    "scalar": _scalar,
    "load": _load,
    "add": _plain(torch.add),
    "sub": _plain(torch.sub),
    "mul": _plain(torch.mul),
    "div": _plain(torch.div),
    "floordiv": _rounding_division(torch.floor_divide, torch.neg),
    "truncdiv": _rounding_division(lambda a, b: torch.div(a, b, rounding_mode="trunc"), torch.neg),
    "mod": _rounding_division(torch.remainder, torch.zeros_like),
    "fmod": _rounding_division(torch.fmod, torch.zeros_like),
    "neg": _plain(torch.neg),
    "abs": _plain(torch.abs),
    "sign": _plain(torch.sign),
    "min": _plain(torch.minimum),
    "max": _plain(torch.maximum),
    "pow": _plain(_pow),
    "sqrt": _plain(torch.sqrt),
    "rsqrt": _plain(torch.rsqrt),
    "exp": _plain(torch.exp),
    "exp2": _plain(torch.exp2),
    "expm1": _plain(torch.expm1),
    "log": _plain(torch.log),
    "log2": _plain(torch.log2),
    "log1p": _plain(torch.log1p),
    "sin": _plain(torch.sin),
    "cos": _plain(torch.cos),
    "tanh": _plain(torch.tanh),
    "sigmoid": _plain(torch.sigmoid),
    "erf": _plain(torch.erf),
    "floor": _plain(torch.floor),
    "ceil": _plain(torch.ceil),
    "trunc": _plain(torch.trunc),
    "round": _plain(torch.round),
    "eq": _plain(torch.eq),
    "ne": _plain(torch.ne),
    "lt": _plain(torch.lt),
    "le": _plain(torch.le),
    "gt": _plain(torch.gt),
    "ge": _plain(torch.ge),
    "and": _plain(torch.bitwise_and),
    "or": _plain(torch.bitwise_or),
    "xor": _plain(torch.bitwise_xor),
    "not": _plain(torch.bitwise_not),
    "shl": _plain(torch.bitwise_left_shift),
    "shr": _plain(torch.bitwise_right_shift),
    "where": _plain(torch.where),
    "cast": _cast,
}
