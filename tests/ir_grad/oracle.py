"""The oracle of the gradient tests: autograd through the evaluation of the graph, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.ir.evaluate import evaluate
from flexgen.ir.grad import score_grad
from flexgen.ir.grad_evaluate import GradValues, evaluate_grad
from flexgen.ir.graph import Graph

Numbers = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a graph is differentiated: its inputs (`grad` among them), buffers and scalars."""

    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    scalars: Numbers


def wanted_buffers(graph: Graph) -> frozenset[str]:
    return frozenset(buffer.name for buffer in graph.buffers if buffer.dtype.is_floating_point)


def by_autograd(graph: Graph, places: Places) -> GradValues:
    """Differentiate the evaluation of the graph."""
    shape = torch.broadcast_shapes(*(value.shape for value in places.inputs.values()))  # type: ignore[no-untyped-call]
    score = places.inputs["score"].double().expand(shape).contiguous().requires_grad_()
    leaves = {name: places.buffers[name].double().requires_grad_() for name in sorted(wanted_buffers(graph))}
    inputs, buffers = {**places.inputs, "score": score}, {**places.buffers, **leaves}
    result = evaluate(graph, inputs, buffers, places.scalars, promote_float=torch.float64).expand(shape)
    if not result.requires_grad:
        return GradValues(torch.zeros(shape, dtype=torch.float64), {})
    upstream = places.inputs["grad"].double().expand(shape)
    found = torch.autograd.grad(result, [score, *leaves.values()], upstream, allow_unused=True, materialize_grads=True)
    return GradValues(found[0], dict(zip(leaves, found[1:], strict=True)))


def by_table(graph: Graph, places: Places) -> GradValues:
    """Differentiate by the derivative table, and evaluate what it gives in float64."""
    grad = score_grad(graph, wanted_buffers(graph))
    return evaluate_grad(grad, graph, places.inputs, places.buffers, places.scalars, promote_float=torch.float64)


def assert_same_gradients(graph: Graph, places: Places, *, only_finite: bool = False, tolerance: float = 1e-9) -> None:
    """Compare the two; with `only_finite`, where autograd gives no NaN or infinity."""
    expected, actual = by_autograd(graph, places), by_table(graph, places)
    _assert_same(actual.dscore.expand(expected.dscore.shape), expected.dscore, only_finite, tolerance)
    for name, gradient in expected.buffers.items():
        _assert_same(actual.buffers.get(name, torch.zeros_like(gradient)), gradient, only_finite, tolerance)


def _assert_same(actual: Tensor, expected: Tensor, only_finite: bool, tolerance: float) -> None:
    if only_finite:
        actual, expected = actual[expected.isfinite()], expected[expected.isfinite()]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-12, equal_nan=True)
