"""All rules of the simplifier, in the order in which they are tried, and those on constants of any dtype."""

from __future__ import annotations

import math

from flexgen.ir.dtypes import ARITHMETIC_DTYPES, is_representable
from flexgen.ir.folding import folded
from flexgen.ir.graph import Node, const, make
from flexgen.ir.identities import IDENTITIES
from flexgen.ir.ops import OPS, DtypeRule
from flexgen.ir.ranges import Ranges
from flexgen.ir.rule import Rule
from flexgen.ir.rules_conversion import CONVERSION_RULES
from flexgen.ir.rules_integer import INTEGER_RULES


def _fold(node: Node, _: Ranges) -> Node | None:
    return folded(node)


def _constant_right(node: Node, _: Ranges) -> Node | None:
    """Swap a constant to the right, except where min and max of two zeros would tell."""
    left, right = node.args
    is_zero_order = node.op in ("min", "max") and node.dtype.is_floating_point and left.attr == 0
    if left.op != "const" or right.op == "const" or is_zero_order:
        return None
    return make(node.op, right, left, dtype=node.dtype)


def _exact_reciprocal(node: Node, _: Ranges) -> Node | None:
    """x / 2**k -> x * 2**-k: both are the same real number, rounded once."""
    dividend, divisor = node.args
    value = divisor.attr if divisor.op == "const" else None
    if not isinstance(value, float) or abs(math.frexp(value)[0]) != 0.5 or node.dtype not in ARITHMETIC_DTYPES:
        return None
    exponent = 1 - math.frexp(value)[1]
    if exponent > 1023:  # beyond float64
        return None
    reciprocal = math.ldexp(math.copysign(1.0, value), exponent)
    if not (is_representable(value, node.dtype) and is_representable(reciprocal, node.dtype)):
        return None
    return make("mul", dividend, const(reciprocal, node.dtype), dtype=node.dtype)


_COMMUTATIVE = frozenset(row.name for row in OPS.values() if row.commutative)
_FOLDABLE = frozenset(row.name for row in OPS.values() if row.rule is not DtypeRule.LEAF)

# Folding comes first, so that no other rule meets an operation on constants alone.
RULES: tuple[Rule, ...] = (
    Rule("constant folding", _FOLDABLE, _fold),
    Rule("constant right", _COMMUTATIVE, _constant_right),
    *IDENTITIES,
    Rule("exact reciprocal", frozenset({"div"}), _exact_reciprocal),
    *INTEGER_RULES,
    *CONVERSION_RULES,
)
