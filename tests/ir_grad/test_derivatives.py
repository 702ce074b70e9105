"""The derivative of each op, against torch's autograd at ordinary points, ties and zeros."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexgen.ir.derivatives import DERIVATIVES
from flexgen.ir.grad import score_grad
from flexgen.ir.graph import Buffer, Graph, Node, const, input_node, make
from flexgen.ir.ops import OPS, DtypeRule, OpKind
from flexgen.ir.parse import parse_graph
from flexgen.ir.score_grad import ScoreGrad
from tests.ir_grad.oracle import Places, assert_same_gradients, by_table

POINTS = (-2.5, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.75, 2.0, 3.0)
PAIRS = tuple(itertools.product(POINTS, POINTS))
OTHER = Buffer("other", torch.float32, (None,), ("1",), requires_grad=True)
ZERO = const(0.0, torch.float32)
SCORE = input_node("score", torch.float32)
LOADED = make("load", input_node("kv_idx"), attr="other", dtype=torch.float32)

FLOAT_OPS = [row.name for row in OPS.values() if row.rule in (DtypeRule.SAME, DtypeRule.FLOAT)]
UNARY = [op for op in FLOAT_OPS if OPS[op].arity == 1]
BINARY = [op for op in FLOAT_OPS if OPS[op].arity == 2 and op not in ("floordiv", "truncdiv")]
CLAMPS = ("min", "max")  # at a bound that is a number the derivative is that of clamp, tested below


def _places(scores: tuple[float, ...], others: tuple[float, ...] = (1.0,), n: float = 3.0) -> Places:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "score": torch.tensor(scores, dtype=torch.float64),
        "kv_idx": torch.arange(len(scores)),
        "grad": torch.randn(len(scores), generator=generator, dtype=torch.float64),
    }
    return Places(inputs, {"other": torch.tensor(others, dtype=torch.float64)}, {"n": n})


def _graph(expression: str) -> Graph:
    return parse_graph(f"score mod(score, b, h, q_idx, kv_idx)   buffers: other float32[*](1) grad return {expression}")


def test_every_op_has_a_rule_for_each_argument() -> None:
    assert set(DERIVATIVES) == set(OPS)
    for op, rules in DERIVATIVES.items():
        assert len(rules) == (OPS[op].arity or 0), op


def test_only_floating_point_ops_let_a_gradient_through() -> None:
    open_ops = {op for op, rules in DERIVATIVES.items() if any(rules)}
    kinds = {OPS[op].kind for op in open_ops}
    assert kinds == {OpKind.ARITHMETIC, OpKind.MATH, OpKind.SELECT, OpKind.CAST}
    assert set(FLOAT_OPS) - open_ops == {"floordiv", "truncdiv", "sign", "floor", "ceil", "trunc", "round"}


@pytest.mark.parametrize("op", UNARY)
def test_unary_derivative_is_that_of_torch(op: str) -> None:
    graph = Graph("score", "mod", make(op, SCORE, dtype=torch.float32))
    assert_same_gradients(graph, _places(POINTS))


@pytest.mark.parametrize("op", BINARY)
def test_binary_derivatives_are_those_of_torch(op: str) -> None:
    lefts, rights = zip(*PAIRS, strict=True)
    for args in ((SCORE, LOADED), (LOADED, SCORE), (SCORE, SCORE)):
        graph = Graph("score", "mod", make(op, *args, dtype=torch.float32), (OTHER,) if LOADED in args else ())
        assert_same_gradients(graph, _places(lefts, rights))


def test_floor_division_is_flat() -> None:
    """Torch has no derivative of `floor_divide` at all, and zeros for `div(rounding_mode="floor")`."""
    assert score_grad(_graph("floordiv(score, load(other, kv_idx))"), frozenset({"other"})) == ScoreGrad(ZERO)


@pytest.mark.parametrize("op", [op for op in BINARY if op not in CLAMPS])
@pytest.mark.parametrize("number", [const(value, torch.float32) for value in (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)])
def test_derivative_beside_a_constant_is_that_of_torch(op: str, number: Node) -> None:
    for args in ((SCORE, number), (number, SCORE)):
        assert_same_gradients(Graph("score", "mod", make(op, *args, dtype=torch.float32)), _places(POINTS))


@pytest.mark.parametrize("exponent", [-2.0, 0.0, 1.0, 2.0, 2.5])
def test_derivative_of_a_power_with_a_number_known_at_run_time(exponent: float) -> None:
    graph = parse_graph("score mod(score, b, h, q_idx, kv_idx)   scalars: n float32   return pow(score, n)")
    positive = tuple(point for point in POINTS if point > 0)
    assert_same_gradients(graph, _places(positive, n=exponent))


@pytest.mark.parametrize("bound", ["0.5", "n"])
def test_a_bound_that_is_a_number_clamps(bound: str) -> None:
    scores = torch.tensor(POINTS, dtype=torch.float64, requires_grad=True)
    places = _places(POINTS, n=0.5)
    (expected,) = torch.autograd.grad(scores.clamp(-1.0, 0.5), scores, places.inputs["grad"])
    scalars = "scalars: n float32" if bound == "n" else ""
    graph = parse_graph(f"score mod(score, b, h, q_idx, kv_idx) {scalars} return min(max(score, -1.0), {bound})")
    assert torch.equal(by_table(graph, places).dscore, expected)


def test_where_passes_the_gradient_to_the_branch_taken_and_exactly_zero_to_the_other() -> None:
    places = _places(POINTS, POINTS)
    found = by_table(_graph("where(gt(score, 0.0), log(score), load(other, kv_idx))"), places)
    scores, grad = places.inputs["score"], places.inputs["grad"]
    taken = scores > 0
    assert torch.equal(found.dscore[~taken], torch.zeros(int((~taken).sum()), dtype=torch.float64))
    torch.testing.assert_close(found.dscore[taken], (grad / scores)[taken])
    assert torch.equal(found.buffers["other"], torch.where(taken, 0.0, grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_passes_the_gradient_unrounded(dtype: torch.dtype) -> None:
    root = make("cast", make("cast", SCORE, dtype=dtype), dtype=torch.float32)
    assert score_grad(Graph("score", "mod", root)).is_identity


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_a_cast_to_no_float_stops_the_gradient(dtype: torch.dtype) -> None:
    root = make("cast", make("cast", SCORE, dtype=dtype), dtype=torch.float32)
    assert score_grad(Graph("score", "mod", root)).is_zero
