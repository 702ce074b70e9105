"""What the gradients of typical score mods look like: small, shared with the forward, and summed where they meet."""

from __future__ import annotations

import time

import pytest
import torch

from flexgen.errors import InternalError, SourceSpan
from flexgen.ir.grad import score_grad
from flexgen.ir.grad_evaluate import evaluate_grad
from flexgen.ir.grad_text import print_score_grad
from flexgen.ir.grad_verify import verify_grad
from flexgen.ir.graph import ALL_AXES, Axis, Buffer, Graph, Mods, Node, const, input_node, make
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.parse import parse_graph
from flexgen.ir.score_grad import Scatter, ScoreGrad
from flexgen.ir.simplify import simplify, simplify_roots
from flexgen.ir.verify import used_captures
from tests.ir_grad.oracle import Places, assert_same_gradients, wanted_buffers

HEADER = (
    "score mod(score, b, h, q_idx, kv_idx)"
    "  buffers: slopes float32[*](1), bias float32[*, *](*, 1), half float16[*](1), ids int32[*](1), t float32[]()"
    "  scalars: cap float32, window int64"
)
SCORE, GRAD = input_node("score", torch.float32), input_node("grad", torch.float32)


def _graph(body: str) -> Graph:
    """Return the simplified graph of a mod that returns the last of the lines."""
    whole = parse_graph(f"{HEADER} {body}")
    used = used_captures(list(whole.nodes()))
    buffers = tuple(buffer for buffer in whole.buffers if buffer.name in used)
    scalars = tuple(scalar for scalar in whole.scalars if scalar.name in used)
    simplified = simplify(Mods(Graph("score", "mod", whole.root, buffers, scalars))).mods.score
    assert simplified is not None
    return simplified


def _gradient(body: str) -> ScoreGrad:
    graph = _graph(body)
    return score_grad(graph, wanted_buffers(graph))


def _lines(body: str) -> list[str]:
    """Return the lines of the text below the header, without dtypes and axes of values."""
    graph = _graph(body)
    text = print_score_grad(score_grad(graph, wanted_buffers(graph)), graph)
    lines = [line.strip() for line in text.split("\n")[1:] if line and not line.startswith("    ")]
    return [line.replace("   float32  {b, h, q, kv}", "") for line in lines]


TEXTS = [
    ("score", ["dscore = grad"]),
    ("mul(score, 0.5)", ["dscore = mul(grad, 0.5)"]),
    ("div(neg(score), 4.0)", ["dscore = mul(grad, -0.25)"]),
    ("div(mul(score, 7.0), 7.0)", ["dscore = grad"]),
    ("sub(score, score)", ["dscore = 0.0"]),
    ("mul(score, score)", ["dscore = mul(grad, mul(score, 2.0))"]),
    ("pow(score, 3.0)", ["dscore = mul(grad, mul(mul(score, score), 3.0))"]),
    ("sqrt(score)", ["dscore = div(mul(grad, 0.5), sqrt(score))"]),
    ("mul(score, load(slopes, h))", ["dscore = mul(grad, load(slopes, h))", "scatter slopes[h] += mul(grad, score)"]),
    ("where(ge(q_idx, kv_idx), score, -inf)", ["dscore = where(ge(q_idx, kv_idx), grad, 0.0)"]),
    ("add(score, where(ge(q_idx, kv_idx), 0.0, -inf))", ["dscore = grad"]),
    ("floor(score)", ["dscore = 0.0"]),
    ("max(score, 0.0)", ["dscore = where(ge(score, 0.0), grad, 0.0)"]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), TEXTS)
def test_gradient_of_a_small_mod(body: str, expected: list[str]) -> None:
    lines = _lines(f"return {body}")
    assert [line.split("   ")[0] for line in lines] == expected


@pytest.mark.parametrize("cap", ["20.0", "cap"])
def test_softcap_shares_its_tanh_and_loses_its_cap(cap: str) -> None:
    assert _lines(f"return mul({cap}, tanh(div(score, {cap})))") == [
        f"v1 = tanh(div(score, {cap}))",
        "dscore = mul(grad, sub(1.0, mul(v1, v1)))",
    ]


def test_branches_of_one_condition_become_one_choice() -> None:
    body = (
        "a = where(eq(h, 0), mul(score, 1.5), score)   float32  {b, h, q, kv}   return where(eq(h, 1), mul(a, 2.0), a)"
    )
    gradient = _gradient(body)
    assert gradient.dscore.op == "mul" and gradient.dscore.args[0] is GRAD
    assert gradient.dscore.args[1].axes == frozenset({Axis.H})
    assert gradient.is_linear and not gradient.needs_score and not gradient.is_identity


@pytest.mark.parametrize(
    ("body", "identity", "zero", "linear", "needs_score"),
    [
        ("add(score, load(slopes, h))", True, False, True, False),
        ("load(slopes, h)", False, True, True, False),
        ("mul(score, load(t))", False, False, True, True),
        ("tanh(score)", False, False, False, True),
        ("where(gt(score, 0.0), score, 0.0)", False, False, False, True),
    ],
)
def test_what_a_kernel_asks_of_the_gradients(
    body: str, identity: bool, zero: bool, linear: bool, needs_score: bool
) -> None:
    found = _gradient(f"return {body}")
    answers = (found.is_identity, found.is_zero, found.is_linear, found.needs_score)
    assert answers == (identity, zero, linear, needs_score)


def test_loads_of_one_element_are_one_scatter_and_loads_of_others_have_their_own() -> None:
    one = "load(slopes, h)"
    found = _gradient(f"return add(add(mul(score, {one}), {one}), load(slopes, kv_idx))")
    assert [scatter.indices for scatter in found.scatters] == [(input_node("h"),), (input_node("kv_idx"),)]
    first, second = found.scatters
    assert first.value is make("mul", GRAD, make("add", SCORE, const(1.0, torch.float32), dtype=torch.float32),
                               dtype=torch.float32)  # fmt: skip
    assert second.value is GRAD


@pytest.mark.parametrize(
    ("load", "axes"),
    [
        ("load(t)", frozenset()),
        ("load(slopes, h)", frozenset({Axis.H})),
        ("load(bias, q_idx, kv_idx)", frozenset({Axis.Q, Axis.KV})),
        ("load(slopes, load(ids, b))", frozenset({Axis.B})),
        ("load(slopes, 3)", frozenset()),
    ],
)
def test_a_scatter_knows_the_axes_over_which_it_is_reduced(load: str, axes: frozenset[Axis]) -> None:
    (scatter,) = _gradient(f"return add(score, {load})").scatters
    assert scatter.axes == axes
    assert scatter.reduced == ALL_AXES - axes


def test_a_half_precision_buffer_gets_a_gradient_that_is_not_rounded() -> None:
    (scatter,) = _gradient("return add(score, cast(tanh(load(half, kv_idx)), float32))").scatters
    assert scatter.buffer == "half" and scatter.value.dtype == torch.float32
    multiplier = scatter.value.args[1]
    assert multiplier.dtype == torch.float32 and multiplier.axes == frozenset({Axis.KV})


def test_float64_scores_have_float64_gradients() -> None:
    root = make("mul", input_node("score", torch.float64), const(0.1, torch.float64), dtype=torch.float64)
    assert score_grad(Graph("score", "mod", root)).dscore.dtype == torch.float64


def test_only_wanted_buffers_get_a_gradient() -> None:
    graph = _graph("return add(score, mul(load(slopes, h), load(bias, q_idx, kv_idx)))")
    found = score_grad(graph, frozenset({"bias", "unknown"}))
    assert [scatter.buffer for scatter in found.scatters] == ["bias"]
    assert score_grad(graph).scatters == ()


def test_indices_and_integers_have_no_gradient() -> None:
    graph = _graph("return add(score, load(slopes, cast(load(half, load(ids, q_idx)), int64)))")
    assert [scatter.buffer for scatter in score_grad(graph, wanted_buffers(graph)).scatters] == ["slopes"]


def test_duplicate_and_outside_indices_are_summed_and_dropped() -> None:
    graph = _graph("return add(score, load(slopes, sub(q_idx, 1)))")
    inputs = {"score": torch.zeros(4), "grad": torch.ones(3, 4), "q_idx": torch.tensor([0, 1, 1, 9])}
    found = evaluate_grad(score_grad(graph, frozenset({"slopes"})), graph, inputs, {"slopes": torch.zeros(2)}, {})
    assert found.buffers["slopes"].tolist() == [6.0, 0.0]


def test_text_shows_the_users_lines_beside_their_derivatives() -> None:
    graph = _graph("a = tanh(score)   float32  {b, h, q, kv}   return add(a, mul(load(slopes, h), sin(a)))")
    span = SourceSpan("mods.py", 1, 0, 1, 9, "capped = torch.tanh(score)")
    tanh = next(node for node in graph.nodes() if node.op == "tanh")
    grad = score_grad(graph, frozenset({"slopes"}), Origins({tanh: (Origin("capped", span),)}))
    assert (
        print_score_grad(grad, graph)
        == """\
grad mod(score, grad, b, h, q_idx, kv_idx)   buffers: slopes float32[*](1)
  # capped = torch.tanh(score)
  capped = tanh(score)   float32  {b, h, q, kv}
  v1 = add(mul(load(slopes, h), cos(capped)), 1.0)   float32  {b, h, q, kv}
  dscore = mul(grad, mul(v1, sub(1.0, mul(capped, capped))))   float32  {b, h, q, kv}
  scatter slopes[h] += mul(grad, sin(capped))   float32  {b, h, q, kv}   reduced over {b, q, kv}
"""
    )


BROKEN = [
    (ScoreGrad(const(1.0, torch.float64)), "the gradient of a float32 score is float64"),
    (ScoreGrad(make("cast", input_node("kv_len"), dtype=torch.float32)), "'kv_len' is no input"),
    (ScoreGrad(GRAD, (Scatter("table", (), GRAD),)), "the buffer is not declared"),
    (ScoreGrad(GRAD, (Scatter("ids", (input_node("h"),), GRAD),)), "a int32 buffer has no gradient"),
    (ScoreGrad(GRAD, (Scatter("half", (), GRAD),)), "the buffer has 1 dimensions"),
    (ScoreGrad(GRAD, (Scatter("half", (GRAD,), GRAD),)), "indices are integers"),
    (ScoreGrad(GRAD, (Scatter("half", (input_node("h"),), const(1.0, torch.float16)),)), "the value is float16"),
]


@pytest.mark.parametrize(("grad", "message"), BROKEN)
def test_broken_gradients_are_found(grad: ScoreGrad, message: str) -> None:
    buffers = (Buffer("ids", torch.int32, (None,), ("1",)), Buffer("half", torch.float16, (None,), ("1",)))
    with pytest.raises(InternalError, match=message):
        verify_grad(grad, Graph("score", "mod", SCORE, buffers))


def test_roots_are_simplified_together_and_stay_shared() -> None:
    doubled = make("mul", const(2.0, torch.float32), SCORE, dtype=torch.float32)
    simpler = simplify_roots((doubled, make("neg", doubled, dtype=torch.float32), SCORE))
    first, second, third = simpler.roots
    assert first is make("mul", SCORE, const(2.0, torch.float32), dtype=torch.float32)
    assert second is make("mul", SCORE, const(-2.0, torch.float32), dtype=torch.float32)
    assert third is SCORE


def _chain(length: int) -> Node:
    """Return a value of `length` nodes on one path, with conditions, sums, numbers and powers of the same number."""
    cap = make("scalar", attr="cap", dtype=torch.float32)
    value: Node = SCORE
    for step in range(length // 5):
        scaled = make("mul", value, const(1.0 + 0.5**step, torch.float32), dtype=torch.float32)
        curved = make("sin", make("div", scaled, cap, dtype=torch.float32), dtype=torch.float32)
        is_taken = make("gt", input_node("kv_idx"), const(step, torch.int64), dtype=torch.bool)
        value = make("where", is_taken, make("add", curved, value, dtype=torch.float32), value, dtype=torch.float32)
    return value


def test_a_graph_of_ten_thousand_nodes_is_differentiated() -> None:
    graph = parse_graph("score mod(score, b, h, q_idx, kv_idx)   scalars: cap float32   return mul(score, cap)")
    deep = Graph("score", "deep", _chain(10_000), (), graph.scalars)
    start = time.perf_counter()
    grad = score_grad(deep)
    assert time.perf_counter() - start < 30
    assert print_score_grad(grad, deep).count("\n") > 1000
    assert repr(grad) and grad == score_grad(deep)


def test_a_deep_graph_has_the_gradient_of_autograd() -> None:
    graph = Graph("score", "deep", _chain(200), (), parse_graph(f"{HEADER} return mul(score, cap)").scalars[:1])
    inputs = {"score": torch.tensor([[0.3], [-1.7]]), "grad": torch.ones(2, 5), "kv_idx": torch.arange(0, 50, 10)}
    assert_same_gradients(graph, Places(inputs, {}, {"cap": 1.5}))
