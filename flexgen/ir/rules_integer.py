"""Rules on integers that compute: with the values of constants, and with the ranges that values stay in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexgen.ir.dtypes import fits, integer_limits, is_integer
from flexgen.ir.graph import Node, const, make
from flexgen.ir.ranges import Range, Ranges
from flexgen.ir.rule import COMPARISONS, Rule


def _integer(node: Node) -> int | None:
    """Return the value of an integer constant."""
    return node.attr if node.op == "const" and isinstance(node.attr, int) and is_integer(node.dtype) else None


def _positive_offset(node: Node, _: Ranges) -> Node | None:
    """x + -3 -> x - 3 and x - -3 -> x + 3, for integers."""
    value = _integer(node.args[1])
    if value is None or value >= 0 or value == integer_limits(node.dtype)[0]:
        return None
    return make("sub" if node.op == "add" else "add", node.args[0], const(-value, node.dtype), dtype=node.dtype)


def _decided_comparison(node: Node, ranges: Ranges) -> Node | None:
    """Replace a comparison that comes out the same for all values in the ranges: `q_idx >= 0`, `x % 4 < 4`."""
    left, right = (ranges.of(arg) for arg in node.args)
    if left is None or right is None:
        return None
    outcome = _DECIDED[node.op](left, right)
    return None if outcome is None else const(outcome, torch.bool)


def _less(a: Range, b: Range) -> bool | None:
    return True if a.high < b.low else False if a.low >= b.high else None


def _equal(a: Range, b: Range) -> bool | None:
    if a.high < b.low or b.high < a.low:
        return False
    return True if a.low == a.high == b.low == b.high else None


def _opposite(outcome: bool | None) -> bool | None:
    return None if outcome is None else not outcome


_DECIDED: dict[str, Callable[[Range, Range], bool | None]] = {
    "lt": _less,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _opposite(_less(a, b)),
    "le": lambda a, b: _opposite(_less(b, a)),
    "eq": _equal,
    "ne": lambda a, b: _opposite(_equal(a, b)),
}


def _decided_bound(node: Node, ranges: Ranges) -> Node | None:
    """min or max of two integers of which one is never the greater."""
    left, right = (ranges.of(arg) for arg in node.args)
    if left is None or right is None:
        return None
    smaller, larger = (node.args[0], node.args[1]) if left.high <= right.low else (node.args[1], node.args[0])
    if left.high > right.low and right.high > left.low:
        return None
    return smaller if node.op == "min" else larger


def _same_offset(node: Node, ranges: Ranges) -> Node | None:
    """Compare x + 3 with y + 3, or with a constant, by comparing x: where no offset wraps.

    A test for the sign stays: the value tested is there anyway, as in `where(i < 0, i + size, i)`.
    """
    left, right = node.args
    base, offset = _split_offset(left, ranges)
    other_base, other_offset = _split_offset(right, ranges)
    value = _integer(right)
    if offset != 0 and offset == other_offset:
        return make(node.op, base, other_base, dtype=torch.bool)
    if offset != 0 and value and fits(value - offset, left.dtype):
        return make(node.op, base, const(value - offset, left.dtype), dtype=torch.bool)
    return None


def _split_offset(node: Node, ranges: Ranges) -> tuple[Node, int]:
    """Split x + 3 into (x, 3) where the sum does not wrap; any other value v is (v, 0)."""
    if node.op not in ("add", "sub") or not ranges.exact(node):
        return node, 0
    offset = _integer(node.args[1]) or 0
    return (node.args[0], offset if node.op == "add" else -offset) if offset else (node, 0)


def _nested_quotient(node: Node, _: Ranges) -> Node | None:
    """(x // a) // b -> x // (a * b) for positive constants."""
    inner, divisor = node.args[0], _integer(node.args[1])
    if inner.op != "floordiv" or divisor is None or divisor <= 0:
        return None
    product = (_integer(inner.args[1]) or 0) * divisor
    if product <= 0 or not fits(product, node.dtype):
        return None
    return make("floordiv", inner.args[0], const(product, node.dtype), dtype=node.dtype)


def _nested_remainder(node: Node, _: Ranges) -> Node | None:
    """(x % a) % b -> x % b where the positive b divides a."""
    inner, divisor = node.args[0], _integer(node.args[1])
    outer = _integer(inner.args[1]) if inner.op == "mod" else None
    if divisor is None or divisor <= 0 or not outer or outer % divisor:
        return None
    return make("mod", inner.args[0], node.args[1], dtype=node.dtype)


def _divided_multiple(node: Node, ranges: Ranges) -> Node | None:
    """(x * a) // b -> x * (a // b) and (x * a) % b -> 0 where b divides a and the product does not wrap."""
    product, divisor = node.args[0], _integer(node.args[1])
    factor = _integer(product.args[1]) if product.op == "mul" else None
    if not divisor or divisor < 0 or factor is None or factor % divisor or not ranges.exact(product):
        return None
    if node.op == "mod":
        return const(0, node.dtype)
    return make("mul", product.args[0], const(factor // divisor, node.dtype), dtype=node.dtype)


def _small_dividend(node: Node, ranges: Ranges) -> Node | None:
    """x // b -> 0 and x % b -> x where 0 <= x < b."""
    dividend, divisor = (ranges.of(arg) for arg in node.args)
    if dividend is None or divisor is None or dividend.low < 0 or dividend.high >= divisor.low:
        return None
    return const(0, node.dtype) if node.op == "floordiv" else node.args[0]


def _flooring(node: Node, ranges: Ranges) -> Node | None:
    """Division toward zero is flooring division where nothing is negative; the analysis knows only the latter."""
    dividend, divisor = (ranges.of(arg) for arg in node.args)
    if dividend is None or divisor is None or dividend.low < 0 or divisor.low <= 0:
        return None
    return make("floordiv" if node.op == "truncdiv" else "mod", *node.args, dtype=node.dtype)


def _non_negative_abs(node: Node, ranges: Ranges) -> Node | None:
    return node.args[0] if ranges.is_non_negative(node.args[0]) else None


INTEGER_RULES: tuple[Rule, ...] = (
    Rule("positive offset", frozenset({"add", "sub"}), _positive_offset),
    Rule("decided comparison", COMPARISONS, _decided_comparison),
    Rule("decided bound", frozenset({"min", "max"}), _decided_bound),
    Rule("same offset", COMPARISONS, _same_offset),
    Rule("nested quotient", frozenset({"floordiv"}), _nested_quotient),
    Rule("nested remainder", frozenset({"mod"}), _nested_remainder),
    Rule("divided multiple", frozenset({"floordiv", "mod"}), _divided_multiple),
    Rule("small dividend", frozenset({"floordiv", "mod"}), _small_dividend),
    Rule("flooring division", frozenset({"truncdiv", "fmod"}), _flooring),
    Rule("non-negative", frozenset({"abs"}), _non_negative_abs),
)
