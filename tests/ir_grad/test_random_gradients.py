"""Gradients of random graphs, against autograd through their evaluation."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings

from flexgen.ir.grad import score_grad
from flexgen.ir.grad_evaluate import evaluate_grad
from flexgen.ir.grad_text import print_score_grad
from flexgen.ir.graph import Graph, Mods, Node
from flexgen.ir.simplify import simplify
from flexgen.ir.text import LINE_LENGTH
from tests.ir import random_graphs
from tests.ir_grad.oracle import Places, assert_same_gradients, wanted_buffers

ROWS, COLUMNS = random_graphs.ROWS, random_graphs.COLUMNS


def _ordinary_places() -> Places:
    """Return places where no tie, zero or infinity comes from the arguments."""
    generator = torch.Generator().manual_seed(3)
    awkward = random_graphs.awkward_arguments()
    inputs = {**awkward.inputs}
    for name in ("score", "grad"):
        inputs[name] = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    buffers = {
        **awkward.buffers,
        "table": torch.randn(ROWS, 4, generator=generator, dtype=torch.float64),
        "temperature": torch.tensor(0.7, dtype=torch.float64),
    }
    return Places(inputs, buffers, awkward.scalars)


def _is_differentiated_by_torch(node: Node) -> bool:
    """Whether torch has the derivative, does not round it to half precision, and clamps by no NaN.

    The product of two of the largest constants is infinite in float32, in which the simplifier folds it.
    """
    match node.op:
        case "floordiv":
            return not node.dtype.is_floating_point
        case "cast":
            return node.dtype != torch.float16
        case "const":
            return node.attr == node.attr and node.attr != 1e30
    return True


def _simplified(graph: Graph) -> Graph:
    simplified = simplify(Mods(graph)).mods.score
    assert simplified is not None
    return simplified


@settings(max_examples=300, deadline=None, derandomize=True)
@given(random_graphs.graphs("score"))
def test_gradients_of_a_random_graph_are_those_of_autograd(graph: Graph) -> None:
    simplified = _simplified(graph)
    assume(all(_is_differentiated_by_torch(node) for node in simplified.nodes()))
    assert_same_gradients(simplified, _ordinary_places(), only_finite=True, tolerance=1e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(random_graphs.graphs("score"))
def test_gradients_of_any_graph_are_well_typed_print_and_evaluate(graph: Graph) -> None:
    simplified = _simplified(graph)
    grad = score_grad(simplified, wanted_buffers(simplified))
    assert grad == score_grad(simplified, wanted_buffers(simplified))
    assert max(map(len, print_score_grad(grad, simplified).split("\n"))) <= LINE_LENGTH
    awkward = random_graphs.awkward_arguments()
    evaluate_grad(grad, simplified, {**awkward.inputs, "grad": torch.tensor(1.0)}, awkward.buffers, awkward.scalars)
    places = [(scatter.buffer, scatter.indices) for scatter in grad.scatters]
    assert len(set(places)) == len(places)
