"""Extremes of floating-point expressions over a block.

Rounding is monotone, so each end is computed as the value itself is. A NaN at either end stands for "nothing is
known", and every rule is written so that it then says nothing: it claims what a comparison with NaN, which is false,
does not deny.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen.ir.graph import Node, const, make
from flexgen.lowering.bounds import Extremes

_RISING = ("cast", "min", "max", "add")


def float_extremes(node: Node, args: Sequence[Extremes | None]) -> Extremes | None:
    """Return the extremes of a floating node from those of its arguments; None where the op has no rule."""
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args) or (node.op == "cast" and node.args[0].dtype == torch.bool):
        return None

    def apply(op: str, *operands: Node) -> Node:
        return make(op, *operands, dtype=node.dtype)

    match node.op:
        case op if op in _RISING:
            return Extremes(apply(op, *(arg.lo for arg in known)), apply(op, *(arg.hi for arg in known)))
        case "sub":
            return Extremes(apply("sub", known[0].lo, known[1].hi), apply("sub", known[0].hi, known[1].lo))
        case "neg":
            return Extremes(apply("neg", known[0].hi), apply("neg", known[0].lo))
        case "abs":
            ends = known[0].lo, apply("neg", known[0].hi)
            least = apply("max", apply("max", *ends), const(0.0, node.dtype))
            return Extremes(least, apply("max", apply("neg", ends[0]), known[0].hi))
    return None


def compare_floats(op: str, a: Extremes, b: Extremes) -> Extremes:
    """Return whether a comparison holds everywhere, and whether perhaps somewhere."""
    match op:
        case "gt" | "ge":
            return compare_floats("lt" if op == "gt" else "le", b, a)
        case "lt":
            return Extremes(_test("lt", a.hi, b.lo), _not(_test("ge", a.lo, b.hi)))
        case "le":
            return Extremes(_test("le", a.hi, b.lo), _not(_test("gt", a.lo, b.hi)))
        case "ne":
            equal = compare_floats("eq", a, b)
            return Extremes(_not(equal.hi), _not(equal.lo))
    apart = _join("or", _test("gt", a.lo, b.hi), _test("lt", a.hi, b.lo))
    same = _join("and", _test("eq", a.lo, a.hi), _join("and", _test("eq", b.lo, b.hi), _test("eq", a.lo, b.lo)))
    return Extremes(same, _not(apart))


def _test(op: str, a: Node, b: Node) -> Node:
    return make(op, a, b, dtype=torch.bool)


def _join(op: str, a: Node, b: Node) -> Node:
    return make(op, a, b, dtype=torch.bool)


def _not(node: Node) -> Node:
    return make("not", node, dtype=torch.bool)
