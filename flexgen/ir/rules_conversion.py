"""Rules on casts, on rounding to whole numbers, and on what surrounds them."""

from __future__ import annotations

import math

import torch

from flexgen.ir.dtypes import fits, integer_limits, is_integer, is_lossless
from flexgen.ir.graph import Node, const, make
from flexgen.ir.ranges import Range, Ranges
from flexgen.ir.rule import COMPARISONS, Rule

_ROUNDINGS = frozenset({"floor", "ceil", "trunc", "round"})


def _integral_rounding(node: Node, _: Ranges) -> Node | None:
    """Rounding what is already a whole number."""
    arg = node.args[0]
    is_whole = arg.op in _ROUNDINGS or (arg.op == "cast" and not arg.args[0].dtype.is_floating_point)
    return arg if is_whole else None


def _same_cast(node: Node, _: Ranges) -> Node | None:
    return node.args[0] if node.args[0].dtype == node.dtype else None


def _cast_of_cast(node: Node, ranges: Ranges) -> Node | None:
    """Cast once where the first cast loses nothing that the second would keep."""
    inner = node.args[0]
    if inner.op != "cast":
        return None
    source, middle, target = inner.args[0], inner.dtype, node.dtype
    if _keeps_values(source, middle, target, ranges) or _keeps_low_bits(source.dtype, middle, target):
        return make("cast", source, dtype=target)
    return None


def _keeps_values(source: Node, middle: torch.dtype, target: torch.dtype, ranges: Ranges) -> bool:
    if is_lossless(source.dtype, middle):
        # What a float outside an integer dtype becomes is not what an integer, or another float, becomes there.
        overflows = is_integer(target) and not is_lossless(source.dtype, target)
        return not (middle.is_floating_point and overflows)
    found = ranges.of(source)
    return found is not None and not middle.is_floating_point and found.within(Range(*integer_limits(middle)))


def _keeps_low_bits(source: torch.dtype, middle: torch.dtype, target: torch.dtype) -> bool:
    integers = is_integer(source) and is_integer(middle) and is_integer(target)
    return integers and torch.iinfo(target).bits <= torch.iinfo(middle).bits


def _cast_of_choice(node: Node, _: Ranges) -> Node | None:
    """Cast the two constants that a condition chooses between."""
    choice = node.args[0]
    if choice.op != "where" or any(arg.op != "const" for arg in choice.args[1:]):
        return None
    branches = (make("cast", arg, dtype=node.dtype) for arg in choice.args[1:])
    return make("where", choice.args[0], *branches, dtype=node.dtype)


def _compared_choice(node: Node, _: Ranges) -> Node | None:
    """Compare the two constants that a condition chooses between: where(c, 1, 0) != 0 -> c."""
    choice, right = node.args
    if choice.op != "where" or any(arg.op != "const" for arg in (*choice.args[1:], right)):
        return None
    branches = (make(node.op, arg, right, dtype=torch.bool) for arg in choice.args[1:])
    return make("where", choice.args[0], *branches, dtype=torch.bool)


def _compared_casts(node: Node, _: Ranges) -> Node | None:
    """Compare before widening: two values of one dtype, or a value with a constant that its dtype can hold.

    A test of a number for its sign stays: the widened number is there anyway, as in `where(i < 0, i + size, i)`.
    """
    left, right = node.args
    if left.op != "cast" or not is_lossless(left.args[0].dtype, left.dtype):
        return None
    source = left.args[0]
    if right.op == "cast" and right.args[0].dtype == source.dtype:
        return make(node.op, source, right.args[0], dtype=torch.bool)
    value = right.attr if right.op == "const" and isinstance(right.attr, int | float) else None
    if value is None or source.dtype.is_floating_point or not _is_value_of(value, source.dtype):
        return None
    if value == 0 and source.dtype != torch.bool:
        return None
    return make(node.op, source, const(value, source.dtype), dtype=torch.bool)


def _is_value_of(value: int | float, dtype: torch.dtype) -> bool:
    return math.isfinite(value) and value == int(value) and fits(int(value), dtype)


CONVERSION_RULES: tuple[Rule, ...] = (
    Rule("whole number", _ROUNDINGS, _integral_rounding),
    Rule("same cast", frozenset({"cast"}), _same_cast),
    Rule("cast of cast", frozenset({"cast"}), _cast_of_cast),
    Rule("cast of choice", frozenset({"cast"}), _cast_of_choice),
    Rule("compared choice", COMPARISONS, _compared_choice),
    Rule("compared casts", COMPARISONS, _compared_casts),
)
