"""Index expressions simplify to what a person would write, and print so."""

from __future__ import annotations

import pytest
import torch

from flexgen.ir.graph import Node, const, make
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.ranges import Range, RangeAnalysis
from flexgen.lowering.symbols import Algebra
from tests.analysis.expressions import I64, B, K, Q, index, load, scalar, test

N = scalar("n")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (index("add", index("sub", Q, 3), 5), "q_idx + 2"),
        (index("sub", index("add", Q, N), Q), "n"),
        (index("sub", 5, index("sub", K, Q)), "q_idx - kv_idx + 5"),
        (index("neg", Q), "-q_idx"),
        (index("mul", index("add", Q, 1), 4), "q_idx * 4 + 4"),
        (index("floordiv", index("add", index("mul", Q, 8), 19), 8), "q_idx + 2"),
        (index("floordiv", index("floordiv", Q, 4), 8), "q_idx // 32"),
        (index("sub", Q, index("mod", Q, 8)), "q_idx // 8 * 8"),
        (index("add", index("mul", index("floordiv", Q, 8), 8), index("mod", Q, 8)), "q_idx"),
        (index("mod", index("add", index("mul", Q, 12), 7), 4), "3"),
        (index("max", index("max", Q, 0), index("sub", Q, 5)), "q_idx"),
        (index("min", index("add", Q, 1), index("add", Q, 3)), "q_idx + 1"),
        (index("max", N, 3), "max(3, n)"),
        (index("where", test("ge", Q, 0), K, N), "kv_idx"),
        (test("gt", index("add", Q, 5), K), "kv_idx < q_idx + 5"),
        (test("ge", Q, Q), "True"),
        (test("eq", index("sub", Q, K), index("sub", Q, 3)), "kv_idx == 3"),
        (test("and", test("lt", Q, 0), test("lt", K, N)), "False"),
        (test("or", test("lt", Q, K), test("le", K, Q)), "True"),
        (test("not", test("lt", Q, 4)), "4 <= q_idx"),
    ],
)
def test_expressions_simplify(node: Node, expected: str) -> None:
    assert expression_text(Algebra().rebuild(node)) == expected


def test_arithmetic_that_may_wrap_is_left_as_it_is() -> None:
    big = Algebra(RangeAnalysis({"n": Range(0, 2**62)}))
    doubled = index("sub", index("mul", N, 4), index("mul", N, 3))
    assert big.rebuild(doubled) is not N
    assert Algebra(RangeAnalysis({"n": Range(0, 2**60)})).rebuild(doubled) is N


def test_narrow_wrapping_is_kept() -> None:
    byte = make("load", B, attr="table", dtype=torch.uint8)
    total = make("sub", make("add", byte, const(200, torch.uint8), dtype=torch.uint8), byte, dtype=torch.uint8)
    assert Algebra().rebuild(make("cast", total, dtype=I64)).op == "cast"


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (index("mul", index("floordiv", Q, 8), 8), Q),
        (Q, index("add", index("mul", index("floordiv", Q, 8), 8), 7)),
        (index("min", N, Q), Q),
        (Q, index("max", index("add", Q, 1), N)),
        (index("where", test("lt", N, 3), Q, index("sub", Q, 4)), Q),
    ],
)
def test_order_is_proven_through_divisions_and_choices(less: Node, more: Node) -> None:
    algebra = Algebra()
    assert algebra.proves_le(less, more)
    assert not algebra.proves_lt(more, less)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (index("mul", index("add", Q, 1), N), "(q_idx + 1) * n"),
        (index("sub", Q, index("sub", K, N)), "q_idx - (kv_idx - n)"),
        (test("and", test("lt", Q, K), test("not", load("flag", B, dtype=torch.bool))), "(q_idx < kv_idx) & ~flag[b]"),
        (index("min", Q, index("min", K, N)), "min(q_idx, kv_idx, n)"),
        (load("table", load("rows", Q)), "table[rows[q_idx]]"),
        (const(-(2**60), I64), "-2**60"),
        (const(-5, I64), "-5"),
    ],
)
def test_expressions_print_as_python(node: Node, expected: str) -> None:
    assert expression_text(node) == expected


def test_an_index_that_may_count_from_the_end_prints_as_it_was_written() -> None:
    row = load("rows", Q)
    wrapped = index("where", test("lt", row, 0), index("add", row, scalar("table.size(0)")), row)
    assert expression_text(load("table", wrapped)) == "table[rows[q_idx]]"


def test_long_expressions_are_shortened() -> None:
    node = Q
    for step in range(500):
        node = index("min", index("mul", node, K), scalar(f"n{step}"))
    assert len(expression_text(node)) <= 160
