"""Evaluation of graphs on tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flexgen.ir.evaluate import EVALUATORS, evaluate
from flexgen.ir.graph import Graph, Node, const, input_node, make
from flexgen.ir.ops import OPS
from flexgen.ir.parse import parse_graph
from tests.ir import random_graphs

SCORE = torch.tensor([-2.5, -0.5, -0.0, 0.0, 0.5, 1.5, 3.0])
HEADER = "score mod(score, b, h, q_idx, kv_idx)"


def _evaluate(text: str, inputs: dict[str, Tensor] | None = None, **captured: Tensor | float) -> Tensor:
    buffers = {name: value for name, value in captured.items() if isinstance(value, Tensor)}
    scalars = {name: value for name, value in captured.items() if not isinstance(value, Tensor)}
    return evaluate(parse_graph(f"{HEADER} {text}"), inputs or {"score": SCORE}, buffers, scalars)


def test_every_op_can_be_evaluated() -> None:
    assert set(EVALUATORS) == set(OPS)


@pytest.mark.parametrize("op", [row.name for row in OPS.values() if row.aten and row.arity == 1])
def test_unary_op_means_what_torch_means(op: str) -> None:
    node = input_node("score", torch.bool if op == "not" else torch.float32)
    values = SCORE > 0 if op == "not" else SCORE
    result = evaluate(Graph("score", "m", make(op, node, dtype=node.dtype)), {"score": values}, {}, {})
    assert torch.equal(result.nan_to_num(7), getattr(torch, OPS[op].aten[0])(values).nan_to_num(7))


BINARY = [
    (row.name, dtype)
    for row in OPS.values()
    for dtype in (torch.float32, torch.int64)
    if row.aten and row.arity == 2 and random_graphs.accepts(row.rule, dtype)
]


@pytest.mark.parametrize(("op", "dtype"), BINARY)
def test_binary_op_means_what_torch_means(op: str, dtype: torch.dtype) -> None:
    left = torch.tensor([-7, -4, -1, 0, 3, 5, 8]).to(dtype)
    right = torch.tensor([2, -3, 5, 4, 3, -2, 1]).to(dtype)
    expected = getattr(torch, OPS[op].aten[0])(left, right)
    node = make(op, input_node("score", dtype), input_node("kv_idx", dtype), dtype=expected.dtype)
    result = evaluate(Graph("score", "m", node), {"score": left, "kv_idx": right}, {}, {})
    assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize(("op", "expected"), [("truncdiv", [-3, 3, -3]), ("fmod", [-1, 1, 1])])
def test_division_toward_zero(op: str, expected: list[int]) -> None:
    left, right = torch.tensor([-7, 7, 7]), torch.tensor([2, 2, -2])
    node = make(op, input_node("q_idx"), input_node("kv_idx"), dtype=torch.int64)
    assert evaluate(Graph("mask", "m", node), {"q_idx": left, "kv_idx": right}, {}, {}).tolist() == expected


@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "mod", "fmod"])
def test_integer_division_that_a_processor_traps_has_a_value(op: str) -> None:
    least = -(2**63)
    node = make(op, input_node("q_idx"), input_node("kv_idx"), dtype=torch.int64)
    inputs = {"q_idx": torch.tensor([5, least]), "kv_idx": torch.tensor([0, -1])}
    assert evaluate(Graph("mask", "m", node), inputs, {}, {}).tolist() == [0, least if "div" in op else 0]


def test_load_outside_the_buffer_is_zero() -> None:
    table = torch.arange(1.0, 7.0).reshape(2, 3)
    rows, columns = torch.tensor([[-1], [0], [1], [2]]), torch.tensor([[-1, 0, 2, 3]])
    text = "buffers: table float32[*, *](*, 1) return load(table, q_idx, kv_idx)"
    result = _evaluate(text, {"q_idx": rows, "kv_idx": columns}, table=table)
    assert result.tolist() == [[0, 0, 0, 0], [0, 1, 3, 0], [0, 4, 6, 0], [0, 0, 0, 0]]


def test_load_from_an_empty_buffer_is_zero() -> None:
    text = "buffers: table float32[*](1) return load(table, q_idx)"
    assert _evaluate(text, {"q_idx": torch.arange(3)}, table=torch.zeros(0)).tolist() == [0, 0, 0]


def test_load_of_a_single_number_takes_no_index() -> None:
    result = _evaluate("buffers: t float32[]() return mul(score, load(t))", t=torch.tensor(2.0))
    assert torch.equal(result, SCORE * 2)


def test_size_of_a_buffer_is_read_off_the_buffer() -> None:
    text = "buffers: table float32[*, *](*, 1) return cast(table.size(1), float32)"
    assert _evaluate(text, table=torch.zeros(4, 9)).item() == 9.0


def test_scalar_has_its_declared_dtype() -> None:
    assert _evaluate("scalars: cap float32 return cap", cap=0.1).dtype == torch.float32


def test_gradients_flow_through_loads() -> None:
    table = torch.ones(3, requires_grad=True)
    text = "buffers: table float32[*](1) grad return load(table, q_idx)"
    loaded = _evaluate(text, {"q_idx": torch.tensor([-1, 0, 0, 2, 3])}, table=table)
    (gradient,) = torch.autograd.grad(loaded.sum(), table)
    assert gradient.tolist() == [2, 0, 1]


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, -1.0, 0.5, -0.5])
def test_pow_is_that_of_torch_for_a_number(exponent: float) -> None:
    base = torch.cat([torch.linspace(-20, 20, 1001), torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    node = make("pow", input_node("score", torch.float32), const(exponent, torch.float32), dtype=torch.float32)
    result = evaluate(Graph("score", "m", node), {"score": base}, {}, {})
    assert torch.equal(result.nan_to_num(7, 8, 9), (base**exponent).nan_to_num(7, 8, 9))


def test_gradient_of_pow_is_finite_where_torch_has_it_finite() -> None:
    score = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    result = _evaluate("return pow(score, 2.0)", {"score": score})
    assert torch.autograd.grad(result.sum(), score)[0].tolist() == [-4, 0, 6]


def _promoted(root: Node, value: float) -> float:
    inputs = {"score": torch.tensor(value, dtype=torch.float64)}
    result = evaluate(Graph("score", "m", root), inputs, {}, {}, promote_float=torch.float64)
    assert result.dtype == torch.float64
    return float(result)


def test_promotion_computes_and_keeps_constants_in_float64() -> None:
    score = input_node("score", torch.float32)
    root = make("mul", score, const(0.1, torch.float32), dtype=torch.float32)
    assert _promoted(root, 1 / 3) == 1 / 3 * 0.1


def test_promotion_rounds_only_where_a_cast_narrows() -> None:
    score = input_node("score", torch.float32)
    narrow = make("cast", score, dtype=torch.bfloat16)
    wide = make("cast", narrow, dtype=torch.float32)
    rounded = float(torch.tensor(1 / 3, dtype=torch.bfloat16))
    assert _promoted(wide, 1 / 3) == rounded
    assert _promoted(make("cast", score, dtype=torch.float64), 1 / 3) == 1 / 3


def test_promotion_keeps_integers_that_become_floats() -> None:
    root = make("cast", const(2**24 + 1, torch.int64), dtype=torch.float32)
    assert _promoted(root, 0.0) == 2**24 + 1


def test_values_broadcast_over_the_axes_they_depend_on_only() -> None:
    q_idx, kv_idx = torch.arange(3)[:, None], torch.arange(4)[None, :]
    inputs = {"q_idx": q_idx, "kv_idx": kv_idx}
    assert _evaluate("return cast(q_idx, float32)", inputs).shape == (3, 1)
    assert _evaluate("return cast(sub(q_idx, kv_idx), float32)", inputs).shape == (3, 4)
