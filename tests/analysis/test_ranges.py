"""Value ranges are sound for every op, and every op has a rule or is refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen.ir.graph import Node, const, input_node, make
from flexgen.ir.ops import OPS
from flexgen.lowering.ranges import LEAF_OPS, RULES, UNKNOWN_OPS, Range, RangeAnalysis, dtype_range, value_range

I64 = torch.int64


def scalar(name: str, dtype: torch.dtype = I64) -> Node:
    return make("scalar", attr=name, dtype=dtype)


def binary(op: str, a: Node, b: Node) -> Node:
    return make(op, a, b, dtype=torch.bool if op in COMPARISONS else a.dtype)


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


COMPARISONS: dict[str, Callable[[int, int], int]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
TOTAL: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    **COMPARISONS,
}
DIVISIONS: dict[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "truncdiv": trunc_div,
    "mod": operator.mod,
    "fmod": lambda a, b: a - b * trunc_div(a, b),
}
SHIFTS: dict[str, Callable[[int, int], int]] = {"shl": operator.lshift, "shr": operator.rshift}
UNARY: dict[str, Callable[[int], int]] = {
    "neg": operator.neg,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "not": operator.invert,
}

small = st.integers(-20, 20)


@st.composite
def ranged_value(draw: st.DrawFn, values: st.SearchStrategy[int] = small) -> tuple[int, Range]:
    """A value and a range that holds it, with ends that may be missing."""
    value, other, third = draw(values), draw(values), draw(values)
    lo, hi = min(value, other), max(value, third)
    return value, Range(draw(st.sampled_from([lo, lo, None])), draw(st.sampled_from([hi, hi, None])))


def assert_inside(found: Range, value: int) -> None:
    assert found.contains(Range.exactly(int(value))), f"{value} not in {found}"


def test_every_op_has_a_rule_or_is_refused() -> None:
    assert set(RULES) | UNKNOWN_OPS | LEAF_OPS == set(OPS)
    assert not set(RULES) & (UNKNOWN_OPS | LEAF_OPS)


@given(st.sampled_from(sorted(TOTAL)), ranged_value(), ranged_value())
def test_binary_rules_hold_the_value(op: str, left: tuple[int, Range], right: tuple[int, Range]) -> None:
    found = value_range(binary(op, scalar("x"), scalar("y")), {"x": left[1], "y": right[1]})
    assert_inside(found, TOTAL[op](left[0], right[0]))


@given(st.sampled_from(sorted(TOTAL)), ranged_value())
def test_binary_rules_hold_the_value_when_both_sides_are_one(op: str, given_value: tuple[int, Range]) -> None:
    value, held = given_value
    assert_inside(value_range(binary(op, scalar("x"), scalar("x")), {"x": held}), TOTAL[op](value, value))


@given(st.sampled_from(sorted(DIVISIONS)), ranged_value(), ranged_value(small.filter(bool)))
def test_division_rules_hold_the_value(op: str, left: tuple[int, Range], right: tuple[int, Range]) -> None:
    found = value_range(binary(op, scalar("x"), scalar("y")), {"x": left[1], "y": right[1]})
    assert_inside(found, DIVISIONS[op](left[0], right[0]))


@given(st.sampled_from(sorted(SHIFTS)), ranged_value(), ranged_value(st.integers(0, 20)))
def test_shift_rules_hold_the_value(op: str, left: tuple[int, Range], right: tuple[int, Range]) -> None:
    found = value_range(binary(op, scalar("x"), scalar("y")), {"x": left[1], "y": right[1]})
    assert_inside(found, SHIFTS[op](left[0], right[0]))


@given(st.sampled_from(sorted(UNARY)), ranged_value())
def test_unary_rules_hold_the_value(op: str, given_value: tuple[int, Range]) -> None:
    found = value_range(make(op, scalar("x"), dtype=I64), {"x": given_value[1]})
    assert_inside(found, UNARY[op](given_value[0]))


@given(st.booleans(), ranged_value(), ranged_value())
def test_selection_holds_the_value(condition: bool, left: tuple[int, Range], right: tuple[int, Range]) -> None:
    node = make("where", scalar("c", torch.bool), scalar("x"), scalar("y"), dtype=I64)
    assert_inside(value_range(node, {"x": left[1], "y": right[1]}), left[0] if condition else right[0])


@given(st.sampled_from(["and", "or", "xor"]), st.booleans(), st.booleans())
def test_logic_on_known_booleans_is_exact(op: str, left: bool, right: bool) -> None:
    node = make(op, const(left, torch.bool), const(right, torch.bool), dtype=torch.bool)
    assert value_range(node) == Range.exactly(TOTAL[op](left, right))


def test_block_index_is_non_negative_and_bounded() -> None:
    q_idx = input_node("q_idx")
    ranges = RangeAnalysis({"q_idx": Range(0, 4095)})
    assert ranges.of(make("floordiv", q_idx, const(128, I64), dtype=I64)) == Range(0, 31)
    assert ranges.of(make("mod", q_idx, const(128, I64), dtype=I64)) == Range(0, 127)
    assert ranges.of(make("sub", q_idx, const(5, I64), dtype=I64)) == Range(-5, 4090)


def test_narrow_arithmetic_that_may_wrap_has_the_whole_range() -> None:
    byte = make("load", input_node("q_idx"), attr="table", dtype=torch.uint8)
    total = make("add", byte, byte, dtype=torch.uint8)
    assert value_range(total) == Range(0, 255)
    assert RangeAnalysis().may_wrap(total)
    assert not RangeAnalysis({"table": Range(0, 100)}).may_wrap(total)


def test_product_of_large_values_is_unknown_rather_than_wrong() -> None:
    product = make("mul", scalar("x"), scalar("x"), dtype=I64)
    assert value_range(product, {"x": Range(0, 2**40)}) == Range()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32])
def test_loads_have_the_range_of_their_dtype(dtype: torch.dtype) -> None:
    assert value_range(make("load", input_node("q_idx"), attr="table", dtype=dtype)) == dtype_range(dtype)


def test_sizes_are_non_negative_and_other_scalars_unknown() -> None:
    assert value_range(scalar("offsets.size(0)")) == Range(0, 2**62)
    assert value_range(scalar("window")) == Range()


def test_casts_keep_the_range_only_where_the_value_fits() -> None:
    wide = scalar("x")
    narrow = make("cast", wide, dtype=torch.int32)
    assert value_range(narrow, {"x": Range(-3, 9)}) == Range(-3, 9)
    assert value_range(narrow, {"x": Range(0, 2**40)}) == dtype_range(torch.int32)


def test_deep_expressions_do_not_recurse() -> None:
    node = input_node("q_idx")
    for _ in range(5000):
        node = make("add", node, const(1, I64), dtype=I64)
    assert value_range(node).lo == 5000
