"""Elementwise aten operations to IR nodes: the one-to-one rows of the op table, and the rewrites."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flexgen.capture.builder import NodeBuilder
from flexgen.capture.call import Call, convert, hint
from flexgen.capture.numbers import number_node
from flexgen.capture.values import Value
from flexgen.ir.graph import Node, const
from flexgen.ir.ops import OPS, DtypeRule

Converter = Callable[[Call], Value]

_LOGICAL = {"add": "or", "mul": "and", "max": "or", "min": "and"}  # of bools
_INTEGER_IDENTITY = frozenset({"floor", "ceil", "trunc", "round"})
_MAX_UNROLLED_POWER = 64


def _row(op: str) -> Converter:
    """Return the converter of an aten spelling that is one row of the op table."""
    rule, arity = OPS[op].rule, OPS[op].arity or 0

    def row(call: Call) -> Value:
        args = call.args[:arity]
        if rule is DtypeRule.COMPARE:
            return compare(call, op, *args)
        if op in _INTEGER_IDENTITY and not call.dtype.is_floating_point:
            return call.operand(args[0], call.dtype)
        return arithmetic(call, op, *args)

    return row


def arithmetic(call: Call, op: str, *args: object) -> Value:
    """Apply an op whose arguments share the result's dtype; arithmetic of bools is logic."""
    chosen = _LOGICAL.get(op, op) if call.dtype == torch.bool else op
    operands = [call.operand(arg, call.dtype) for arg in args]
    return call.pointwise(lambda *nodes: call.builder.node(chosen, *nodes, dtype=call.dtype), *operands)


def compare(call: Call, op: str, left: object, right: object) -> Value:
    dtype = call.promoted(left, right)
    if dtype == torch.bool and op not in ("eq", "ne"):
        dtype = torch.int32  # False < True
    operands = (call.operand(left, dtype), call.operand(right, dtype))
    return call.pointwise(lambda a, b: call.builder.compare(op, a, b), *operands)


def _built(build: Callable[[NodeBuilder, Node], Node]) -> Converter:
    """Return the converter of a one-argument function of the argument in the result's dtype."""

    def unary(call: Call) -> Value:
        return call.pointwise(lambda x: build(call.builder, x), call.operand(call.args[0], call.dtype))

    return unary


def _tested(build: Callable[[NodeBuilder, Node], Node]) -> Converter:
    """Return the converter of a predicate on floats, which is False (or True: isfinite) on other dtypes."""

    def predicate(call: Call) -> Value:
        value = call.args[0]
        if not value.dtype.is_floating_point:
            return call.pointwise(lambda _: const(call.name == "isfinite", torch.bool), value)
        return call.pointwise(lambda x: build(call.builder, x), value)

    return predicate


def _scaled(call: Call, arg: object, factor: object) -> Value:
    """Return arg * factor in the result's dtype (the `alpha` of add and sub, the `value` of addcmul)."""
    operand = call.operand(arg, call.dtype)
    if number_node(factor) is None and factor == 1:
        return operand
    by = call.operand(factor, call.dtype)
    shaped = Call("mul", "", (), call.dtype, operand.shape, call.context)
    return shaped.pointwise(lambda a, b: call.builder.binary("mul", a, b), operand, by)


def _add(call: Call) -> Value:
    left, right, alpha = (*call.args, 1)[:3]
    return arithmetic(call, "add", left, _scaled(call, right, alpha))


def _sub(call: Call) -> Value:
    left, right, alpha = (*call.args, 1)[:3]
    return arithmetic(call, "sub", left, _scaled(call, right, alpha))


def _rsub(call: Call) -> Value:
    left, right, alpha = (*call.args, 1)[:3]
    return arithmetic(call, "sub", right, _scaled(call, left, alpha))


def _div(call: Call) -> Value:
    left, right, rounding = (*call.args, None)[:3]
    match rounding:
        case "floor":
            return arithmetic(call, "floordiv", left, right)
        case "trunc" if not call.dtype.is_floating_point:
            return arithmetic(call, "truncdiv", left, right)
        case "trunc":
            operands = (call.operand(left, call.dtype), call.operand(right, call.dtype))
            build = call.builder
            return call.pointwise(lambda a, b: build.node("trunc", build.binary("div", a, b), dtype=a.dtype), *operands)
    return arithmetic(call, "div", left, right)


def _power_chain(builder: NodeBuilder, base: Node, exponent: int) -> Node:
    """Return base ** exponent for exponent >= 1 by squaring."""
    result: Node | None = None
    while True:
        if exponent & 1:
            result = base if result is None else builder.binary("mul", result, base)
        exponent >>= 1
        if not exponent and result is not None:
            return result
        base = builder.binary("mul", base, base)


def _constant_power(builder: NodeBuilder, base: Node, exponent: float) -> Node | None:
    """Return base ** exponent without `pow`, where the exponent allows it."""
    if exponent == 0:
        return const(1, base.dtype)
    if exponent == int(exponent) if math.isfinite(exponent) else False:
        whole = int(exponent)
        if 0 < whole <= _MAX_UNROLLED_POWER:
            return _power_chain(builder, base, whole)
        if base.dtype.is_floating_point and -_MAX_UNROLLED_POWER <= whole < 0:
            return builder.binary("div", const(1, base.dtype), _power_chain(builder, base, -whole))
    if base.dtype.is_floating_point and abs(exponent) == 0.5:
        return builder.node("sqrt" if exponent > 0 else "rsqrt", base, dtype=base.dtype)
    return None


def _integer_exp2(builder: NodeBuilder, exponent: Node) -> Node:
    """Return 2 ** exponent of an integer: 0 where the exponent is negative, as in torch."""
    zero, one = const(0, exponent.dtype), const(1, exponent.dtype)
    if builder.is_nonnegative(exponent):
        return builder.binary("shl", one, exponent)
    power = builder.binary("shl", one, builder.binary("max", exponent, zero))
    return builder.where(builder.compare("lt", exponent, zero), zero, power)


def _pow(call: Call) -> Value:
    base, exponent = call.args[:2]
    if isinstance(base, int | float) and hint(base) == 2 and call.dtype.is_floating_point:
        return arithmetic(call, "exp2", exponent)
    if isinstance(exponent, int | float):
        fixed = float(exponent)

        def build(node: Node) -> Node:
            special = _constant_power(call.builder, node, fixed)
            if special is not None:
                return special
            return call.builder.binary("pow", node, const(fixed, node.dtype))

        if call.dtype.is_floating_point or 0 <= fixed <= _MAX_UNROLLED_POWER:
            return call.pointwise(build, call.operand(base, call.dtype))
    if not call.dtype.is_floating_point and isinstance(base, int) and hint(base) == 2:
        return call.pointwise(lambda x: _integer_exp2(call.builder, x), call.operand(exponent, call.dtype))
    if not call.dtype.is_floating_point:
        call.refuse("a power of integers whose exponent is not a small constant.", "convert the base with `.float()`.")
    return arithmetic(call, "pow", base, exponent)


def _clamp(call: Call) -> Value:
    value, low, high = (*call.args, None)[:3]
    result = call.operand(value, call.dtype)
    for op, bound in (("max", low), ("min", high)):
        if bound is not None:
            result = arithmetic(call, op, result, bound)
    return result


def _clamp_low(call: Call) -> Value:
    return arithmetic(call, "max", *call.args[:2])


def _clamp_high(call: Call) -> Value:
    return arithmetic(call, "min", *call.args[:2])


def _truth(call: Call, arg: object) -> Value:
    return call.operand(arg, torch.bool) if not isinstance(arg, Value) else convert(call.context, arg, torch.bool)


def _logical(op: str) -> Converter:
    def logical(call: Call) -> Value:
        operands = [_truth(call, arg) for arg in call.args[: OPS[op].arity]]
        return call.pointwise(lambda *nodes: call.builder.node(op, *nodes, dtype=torch.bool), *operands)

    return logical


def _where(call: Call) -> Value:
    condition, left, right = call.args[:3]
    return _select(call, condition, left, right)


def _select(call: Call, condition: object, left: object, right: object) -> Value:
    operands = (_truth(call, condition), call.operand(left, call.dtype), call.operand(right, call.dtype))
    return call.pointwise(call.builder.where, *operands)


def _masked_fill(call: Call) -> Value:
    value, mask, fill = call.args[:3]
    return _select(call, mask, fill, value)


def _lerp(call: Call) -> Value:
    start, end, weight = (call.operand(arg, call.dtype) for arg in call.args[:3])
    build = call.builder

    def formula(a: Node, b: Node, w: Node) -> Node:
        return build.binary("add", a, build.binary("mul", w, build.binary("sub", b, a)))

    return call.pointwise(formula, start, end, weight)


def _add_combined(op: str) -> Converter:
    """Return the converter of addcmul and addcdiv: self + value * (a op b)."""

    def combined(call: Call) -> Value:
        base, left, right, factor = (call.operand(arg, call.dtype) for arg in (*call.args, 1)[:4])
        build = call.builder
        is_one = number_node(call.args[-1]) is None and len(call.args) > 3 and call.args[3] == 1

        def formula(a: Node, x: Node, y: Node, f: Node) -> Node:
            term = build.binary(op, x, y)
            return build.binary("add", a, term if is_one else build.binary("mul", f, term))

        return call.pointwise(formula, base, left, right, factor)

    return combined


def _copysign(call: Call) -> Value:
    build = call.builder

    def formula(size: Node, sign: Node) -> Node:
        zero, one = const(0, sign.dtype), const(1, sign.dtype)
        is_minus_zero = build.compare("lt", build.binary("div", one, sign), zero)
        is_negative = build.binary("or", build.compare("lt", sign, zero), is_minus_zero)
        magnitude = build.node("abs", size, dtype=size.dtype)
        return build.where(is_negative, build.node("neg", magnitude, dtype=size.dtype), magnitude)

    return call.pointwise(formula, *(call.operand(arg, call.dtype) for arg in call.args[:2]))


def _round(call: Call) -> Value:
    if len(call.args) > 1 and call.args[1] != 0:
        call.refuse(
            "only rounding to whole numbers is compiled.", "scale before and after: `torch.round(x * 100) / 100`."
        )
    return _row("round")(call)


def _cast(call: Call) -> Value:
    return convert(call.context, call.args[0], call.dtype)


def _ignoring_nan(op: str) -> Converter:
    """Return the converter of fmin and fmax, which take the other argument where one is NaN."""

    def converter(call: Call) -> Value:
        build = call.builder

        def formula(a: Node, b: Node) -> Node:
            if not a.dtype.is_floating_point:
                return build.binary(op, a, b)
            both = build.where(build.compare("ne", b, b), a, build.binary(op, a, b))
            return build.where(build.compare("ne", a, a), b, both)

        return call.pointwise(formula, *(call.operand(arg, call.dtype) for arg in call.args[:2]))

    return converter


def _hypot(call: Call) -> Value:
    build = call.builder

    def formula(a: Node, b: Node) -> Node:
        squares = build.binary("add", build.binary("mul", a, a), build.binary("mul", b, b))
        return build.node("sqrt", squares, dtype=a.dtype)

    return call.pointwise(formula, *(call.operand(arg, call.dtype) for arg in call.args[:2]))


def _magnitude_test(op: str) -> Callable[[NodeBuilder, Node], Node]:
    return lambda build, x: build.compare(op, build.node("abs", x, dtype=x.dtype), const(math.inf, x.dtype))


def _half_difference(sign: str) -> Callable[[NodeBuilder, Node], Node]:
    """Return the formula of sinh (`sub`) and cosh (`add`)."""

    def formula(build: NodeBuilder, x: Node) -> Node:
        grows = build.node("exp", x, dtype=x.dtype)
        decays = build.node("exp", build.node("neg", x, dtype=x.dtype), dtype=x.dtype)
        return build.binary("mul", build.binary(sign, grows, decays), const(0.5, x.dtype))

    return formula


def _tan(build: NodeBuilder, x: Node) -> Node:
    return build.binary("div", build.node("sin", x, dtype=x.dtype), build.node("cos", x, dtype=x.dtype))


def _log10(build: NodeBuilder, x: Node) -> Node:
    return build.binary("mul", build.node("log", x, dtype=x.dtype), const(1 / math.log(10), x.dtype))


def _relu(build: NodeBuilder, x: Node) -> Node:
    """Return a choice where a derivative may be taken: at 0 that of relu is 0, and that of `max`, as of clamp, is 1."""
    zero = const(0, x.dtype)
    if not x.dtype.is_floating_point:
        return build.binary("max", x, zero)
    return build.where(build.compare("le", x, zero), zero, x)


def _is_equal_to(value: float) -> Callable[[NodeBuilder, Node], Node]:
    return lambda build, x: build.compare("eq", x, const(value, x.dtype))


_ROWS: dict[str, Converter] = {spelling: _row(op.name) for op in OPS.values() for spelling in op.aten}

POINTWISE: dict[str, Converter] = {
    **_ROWS,
    **{f"__{name}__": _row(op) for name, op in (("and", "and"), ("or", "or"), ("xor", "xor"))},
    **{"__lshift__": _row("shl"), "__rshift__": _row("shr"), "shift_left": _row("shl")},
    **{"shift_right_arithmetic": _row("shr"), "not": _row("not")},
    **{"add": _add, "sub": _sub, "rsub": _rsub, "subtract": _sub, "div": _div, "true_divide": _div, "divide": _div},
    **{"floor_divide": _row("floordiv"), "multiply": _row("mul"), "negative": _row("neg"), "absolute": _row("abs")},
    **{"pow": _pow, "float_power": _pow, "clamp": _clamp, "clamp_min": _clamp_low, "clamp_max": _clamp_high},
    **{"fmin": _ignoring_nan("min"), "fmax": _ignoring_nan("max"), "hypot": _hypot},
    **{"sgn": _row("sign"), "round": _round},
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    **{"where": _where, "masked_fill": _masked_fill, "lerp": _lerp, "copysign": _copysign},
    **{"addcmul": _add_combined("mul"), "addcdiv": _add_combined("div")},
    **{"_to_copy": _cast, "convert_element_type": _cast, "to": _cast},
    "reciprocal": _built(lambda build, x: build.binary("div", const(1, x.dtype), x)),
    "square": _built(lambda build, x: build.binary("mul", x, x)),
    "relu": _built(_relu),
    "frac": _built(lambda build, x: build.binary("sub", x, build.node("trunc", x, dtype=x.dtype))),
    "erfc": _built(lambda build, x: build.binary("sub", const(1, x.dtype), build.node("erf", x, dtype=x.dtype))),
    **{"log10": _built(_log10), "tan": _built(_tan)},
    **{"sinh": _built(_half_difference("sub")), "cosh": _built(_half_difference("add"))},
    "isnan": _tested(lambda build, x: build.compare("ne", x, x)),
    **{"isinf": _tested(_magnitude_test("eq")), "isfinite": _tested(_magnitude_test("lt"))},
    **{"isposinf": _tested(_is_equal_to(math.inf)), "isneginf": _tested(_is_equal_to(-math.inf))},
}
