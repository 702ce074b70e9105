"""Checks the rules that the gradients of a score mod obey; a broken one is flexgen's own fault."""

from __future__ import annotations

from collections.abc import Iterator

from flexgen.ir.derivatives import gradient_dtype
from flexgen.ir.dtypes import dtype_name, is_integer
from flexgen.ir.grad_text import print_score_grad
from flexgen.ir.graph import Graph, topological
from flexgen.ir.score_grad import GRAD_INPUTS, Scatter, ScoreGrad
from flexgen.ir.verify import expression_problems, refuse


def verify_grad(grad: ScoreGrad, graph: Graph) -> None:
    """Check that gradients are well typed, and read only what a kernel of the graph's mod has.

    Raises:
        InternalError: a rule is broken; the message lists the broken rules and holds the text of the gradients.
    """
    problems = list(expression_problems(list(topological(*grad.roots)), graph, GRAD_INPUTS))
    if graph.kind != "score":
        problems.append(f"a {graph.kind} has no gradients")
    if grad.dscore.dtype != gradient_dtype(graph.root.dtype):
        problems.append(f"the gradient of a {dtype_name(graph.root.dtype)} score is {dtype_name(grad.dscore.dtype)}")
    for scatter in grad.scatters:
        problems.extend(f"scatter into {scatter.buffer!r}: {problem}" for problem in _scatter_problems(scatter, graph))
    refuse(problems, lambda: print_score_grad(grad, graph))


def _scatter_problems(scatter: Scatter, graph: Graph) -> Iterator[str]:
    buffer = next((buffer for buffer in graph.buffers if buffer.name == scatter.buffer), None)
    if buffer is None:
        yield "the buffer is not declared"
        return
    if not buffer.dtype.is_floating_point:
        yield f"a {dtype_name(buffer.dtype)} buffer has no gradient"
    if len(scatter.indices) != buffer.rank:
        yield f"the buffer has {buffer.rank} dimensions"
    if scatter.value.dtype != gradient_dtype(buffer.dtype):
        yield f"the value is {dtype_name(scatter.value.dtype)}"
    if not all(is_integer(index.dtype) for index in scatter.indices):
        yield "indices are integers"
