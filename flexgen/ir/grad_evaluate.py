"""Evaluation of a score mod's gradients on torch tensors: the meaning of a `ScoreGrad`, and the oracle of the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Node
from flexgen.ir.score_grad import Scatter, ScoreGrad


@dataclass(frozen=True, slots=True)
class GradValues:
    """Values of gradients.

    Attributes:
        dscore: gradient in the raw score, broadcast over the inputs that it depends on.
        buffers: by name, for each buffer that is scattered into, a gradient of the buffer's shape in the dtype of
            the scattered values.
    """

    dscore: Tensor
    buffers: Mapping[str, Tensor]


def evaluate_grad(
    grad: ScoreGrad,
    graph: Graph,
    inputs: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    scalars: Mapping[str, int | float],
    *,
    promote_float: torch.dtype | None = None,
) -> GradValues:
    """Evaluate the gradients of a graph's mod; the arguments are those of `evaluate`.

    Args:
        inputs: `grad` among them. They are expanded against each other: each position adds its value.
    """
    expanded = torch.broadcast_tensors(*inputs.values())  # type: ignore[no-untyped-call]
    places = dict(zip(inputs, expanded, strict=True))

    def value(node: Node) -> Tensor:
        return evaluate(dataclasses.replace(graph, root=node), places, buffers, scalars, promote_float=promote_float)

    sums: dict[str, Tensor] = {}
    shape = next(iter(places.values())).shape
    for scatter in grad.scatters:
        added = _scattered(scatter, buffers[scatter.buffer], value, shape)
        sums[scatter.buffer] = added if scatter.buffer not in sums else sums[scatter.buffer] + added
    return GradValues(value(grad.dscore), sums)


def _scattered(scatter: Scatter, buffer: Tensor, value: Callable[[Node], Tensor], shape: torch.Size) -> Tensor:
    """Return zeros of the buffer's shape with the values of all places inside of it added."""
    values = value(scatter.value).expand(shape)
    indices = [value(index).long().expand(shape) for index in scatter.indices]
    inside = torch.ones(shape, dtype=torch.bool, device=buffer.device)
    for index, size in zip(indices, buffer.shape, strict=True):
        inside &= (index >= 0) & (index < size)
    total = torch.zeros(buffer.shape, dtype=values.dtype, device=buffer.device)
    if not indices:
        return total + values.sum()
    return total.index_put_(tuple(index[inside] for index in indices), values[inside], accumulate=True)
