"""The derivative table: for each op, one rule an argument, which turns the slope of the result into the argument's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flexgen.ir.graph import Node, const, make
from flexgen.ir.slope import Slope, converted, is_number

# Takes the slope of a node and the node; None in the table: nothing flows to that argument.
ArgumentRule = Callable[[Slope, Node], Slope]


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the gradient of a value is computed: float32, or float64 for a float64 value."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _operation(op: str, *args: Node) -> Node:
    return make(op, *args, dtype=args[0].dtype)


def _number(value: float, like: Node) -> Node:
    return const(value, like.dtype)


def _compare(op: str, left: Node, right: Node) -> Node:
    return make(op, left, right, dtype=torch.bool)


def _not(condition: Node) -> Node:
    return condition.args[0] if condition.op == "not" else make("not", condition, dtype=torch.bool)


def _wide(node: Node) -> Node:
    """Return a half-precision value in float32, in which derivatives of it are computed."""
    return converted(node, gradient_dtype(node.dtype))


def _same(slope: Slope, _: Node) -> Slope:
    return slope


def _negated(slope: Slope, _: Node) -> Slope:
    return slope.scaled(-1.0)


def _times_argument(index: int) -> ArgumentRule:
    return lambda slope, node: slope.times(node.args[index])


def _dividend(slope: Slope, node: Node) -> Slope:
    return slope.over(node.args[1])


def _divisor(slope: Slope, node: Node) -> Slope:
    return slope.times(node).over(node.args[1]).scaled(-1.0)


def _modulus(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("floordiv", *map(_wide, node.args))).scaled(-1.0)


def _fmod_modulus(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("trunc", _operation("div", *map(_wide, node.args)))).scaled(-1.0)


def _abs(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("sign", node.args[0]))


def _extremum(index: int, reaches: str, misses: str) -> ArgumentRule:
    """Return the rule of min and max: a bound that is a number clamps, else a tie is shared evenly, as in torch."""

    def rule(slope: Slope, node: Node) -> Slope:
        own, other = node.args[index], node.args[1 - index]
        if is_number(other):
            return slope.guarded(_compare(reaches, own, other))
        share = make("where", _compare("eq", *node.args), _number(0.5, own), _number(1.0, own), dtype=own.dtype)
        return slope.guarded(_not(_compare(misses, own, other))).times(share)

    return rule


def _power_base(slope: Slope, node: Node) -> Slope:
    base, exponent = map(_wide, node.args)
    if exponent.op != "const":
        slope = slope.guarded(_compare("ne", exponent, _number(0.0, exponent)))
    less = _operation("sub", exponent, _number(1.0, exponent))
    return slope.times(exponent).times(_operation("pow", base, less))


def _power_exponent(slope: Slope, node: Node) -> Slope:
    base, exponent = map(_wide, node.args)
    if base.op == "const" and isinstance(base.attr, float) and 0.0 < base.attr < math.inf:
        return slope.times(node).scaled(math.log(base.attr))
    is_flat = _operation(
        "and",
        _compare("eq", base, _number(0.0, base)),
        _compare("ge", exponent, _number(0.0, exponent)),
    )
    return slope.guarded(_not(is_flat)).times(node).times(_operation("log", base))


def _sqrt(slope: Slope, node: Node) -> Slope:
    return slope.scaled(0.5).over(node)


def _rsqrt(slope: Slope, node: Node) -> Slope:
    result = _wide(node)
    return slope.times(_operation("mul", _operation("mul", result, result), result)).scaled(-0.5)


def _exp2(slope: Slope, node: Node) -> Slope:
    return slope.times(node).scaled(math.log(2.0))


def _expm1(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("add", _wide(node), _number(1.0, _wide(node))))


def _log(slope: Slope, node: Node) -> Slope:
    return slope.over(node.args[0])


def _log2(slope: Slope, node: Node) -> Slope:
    return slope.over(node.args[0]).scaled(1.0 / math.log(2.0))


def _log1p(slope: Slope, node: Node) -> Slope:
    argument = _wide(node.args[0])
    return slope.over(_operation("add", argument, _number(1.0, argument)))


def _sin(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("cos", _wide(node.args[0])))


def _cos(slope: Slope, node: Node) -> Slope:
    return slope.times(_operation("sin", _wide(node.args[0]))).scaled(-1.0)


def _tanh(slope: Slope, node: Node) -> Slope:
    result = _wide(node)
    return slope.times(_operation("sub", _number(1.0, result), _operation("mul", result, result)))


def _sigmoid(slope: Slope, node: Node) -> Slope:
    result = _wide(node)
    return slope.times(_operation("mul", result, _operation("sub", _number(1.0, result), result)))


def _erf(slope: Slope, node: Node) -> Slope:
    argument = _wide(node.args[0])
    bell = _operation("exp", _operation("neg", _operation("mul", argument, argument)))
    return slope.times(bell).scaled(2.0 / math.sqrt(math.pi))


def _taken(slope: Slope, node: Node) -> Slope:
    return slope.guarded(node.args[0])


def _not_taken(slope: Slope, node: Node) -> Slope:
    return slope.guarded(_not(node.args[0]))


def _cast(slope: Slope, node: Node) -> Slope:
    return slope.cast(gradient_dtype(node.args[0].dtype))


# One entry an argument. A load has any number of indices, none of which gets a gradient.
DERIVATIVES: dict[str, tuple[ArgumentRule | None, ...]] = {
    "input": (),
    "const": (),
    "scalar": (),
    "load": (),
    "add": (_same, _same),
    "sub": (_same, _negated),
    "mul": (_times_argument(1), _times_argument(0)),
    "div": (_dividend, _divisor),
    "floordiv": (None, None),
    "truncdiv": (None, None),
    "mod": (_same, _modulus),
    "fmod": (_same, _fmod_modulus),
    "neg": (_negated,),
    "abs": (_abs,),
    "sign": (None,),
    "min": (_extremum(0, "le", "gt"), _extremum(1, "le", "gt")),
    "max": (_extremum(0, "ge", "lt"), _extremum(1, "ge", "lt")),
    "pow": (_power_base, _power_exponent),
    "sqrt": (_sqrt,),
    "rsqrt": (_rsqrt,),
    "exp": (lambda slope, node: slope.times(node),),
    "exp2": (_exp2,),
    "expm1": (_expm1,),
    "log": (_log,),
    "log2": (_log2,),
    "log1p": (_log1p,),
    "sin": (_sin,),
    "cos": (_cos,),
    "tanh": (_tanh,),
    "sigmoid": (_sigmoid,),
    "erf": (_erf,),
    "floor": (None,),
    "ceil": (None,),
    "trunc": (None,),
    "round": (None,),
    "eq": (None, None),
    "ne": (None, None),
    "lt": (None, None),
    "le": (None, None),
    "gt": (None, None),
    "ge": (None, None),
    "and": (None, None),
    "or": (None, None),
    "xor": (None, None),
    "not": (None,),
    "shl": (None, None),
    "shr": (None, None),
    "where": (None, _taken, _not_taken),
    "cast": (_cast,),
}
