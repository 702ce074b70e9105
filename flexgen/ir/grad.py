"""Reverse-mode differentiation of a score mod: from its graph to a `ScoreGrad`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from flexgen.ir.derivatives import DERIVATIVES, gradient_dtype
from flexgen.ir.grad_verify import verify_grad
from flexgen.ir.graph import Graph, Node, const, input_node
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.score_grad import Scatter, ScoreGrad
from flexgen.ir.simplify import simplify_roots
from flexgen.ir.slope import Slope, total


def score_grad(graph: Graph, wanted: frozenset[str] = frozenset(), origins: Origins | None = None) -> ScoreGrad:
    """Return the gradients of a score mod in its score and in the `wanted` buffers.

    They are those of torch's autograd, with what torch rounds to a half-precision dtype kept in float32, and two
    differences where a derivative does not exist: a branch of `where` that is not taken adds exactly 0 even if its
    own derivative is infinite, and a captured number cancels against itself even if it is 0.

    Args:
        graph: the graph of a score mod. If it is simplified, no two scatters of a buffer have the same indices.
        wanted: names of captured buffers; those that are not floating, or not read, have no gradient.
        origins: the user's lines.

    Raises:
        InternalError: the derivatives break the rules of the IR.
    """
    slopes = _Slopes(graph, wanted, origins or Origins())
    grad = input_node("grad", gradient_dtype(graph.root.dtype))
    found = ScoreGrad(slopes.dscore(grad), tuple(slopes.scatters(grad)), slopes.origins())
    result = _simplified(found)
    verify_grad(result, graph)
    return result


class _Slopes:
    """The slopes of the leaves that a gradient is wanted for, by one walk from the root down. Never recurses."""

    def __init__(self, graph: Graph, wanted: frozenset[str], origins: Origins) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes())
        self._wanted = wanted
        self._origins = dict(origins.table)
        self._forward = frozenset(self._nodes)
        self._reached = self._with_gradient()
        self._found = self._walk(graph.root)

    def dscore(self, grad: Node) -> Node:
        slopes = [slope for node, slope in self._found.items() if _is_score(node)]
        return slopes[0].of(grad) if slopes else const(0.0, grad.dtype)

    def scatters(self, grad: Node) -> Iterator[Scatter]:
        for buffer in self._graph.buffers:
            for node in self._nodes:
                if node in self._found and node.op == "load" and node.attr == buffer.name:
                    yield Scatter(buffer.name, node.args, self._found[node].of(grad))

    def origins(self) -> Origins:
        return Origins(self._origins)

    def _with_gradient(self) -> frozenset[Node]:
        """Return the nodes below which a gradient is wanted."""
        reached: set[Node] = set()
        for node in self._nodes:
            if node.dtype.is_floating_point and (
                self._is_wanted(node) or any(arg in reached for _, arg in _differentiable(node))
            ):
                reached.add(node)
        return frozenset(reached)

    def _is_wanted(self, node: Node) -> bool:
        return _is_score(node) or (node.op == "load" and node.attr in self._wanted)

    def _walk(self, root: Node) -> Mapping[Node, Slope]:
        """Return the slope of each wanted leaf that has one."""
        found: dict[Node, Slope] = {}
        pending: defaultdict[Node, list[Slope]] = defaultdict(list)
        pending[root].append(Slope(gradient_dtype(root.dtype)))
        for node in reversed(self._nodes):
            parts = pending.pop(node, [])
            slope = total(parts) if parts and node in self._reached else None
            if slope is None or slope.is_zero:
                continue
            if self._is_wanted(node):
                found[node] = slope
            for index, arg in _differentiable(node):
                if arg in self._reached:
                    pending[arg].append(self._through(node, index, slope))
        return found

    def _through(self, node: Node, index: int, slope: Slope) -> Slope:
        rule = DERIVATIVES[node.op][index]
        assert rule is not None
        result = rule(slope, node)
        self._note_origins(node, result)
        return result

    def _note_origins(self, node: Node, slope: Slope) -> None:
        """Give the new nodes of a derivative the user's lines of what it is the derivative of."""
        lines = tuple(Origin(None, origin.span) for origin in self._origins.get(node, ()) if origin.span)
        stack = [part for part in (slope.above, slope.below, slope.guard) if part is not None] if lines else []
        while stack:
            part = stack.pop()
            if part.args and part not in self._forward and part not in self._origins:
                self._origins[part] = lines
                stack.extend(part.args)


def _is_score(node: Node) -> bool:
    return node.op == "input" and node.attr == "score"


def _differentiable(node: Node) -> Iterator[tuple[int, Node]]:
    """Yield the arguments to which the op's derivative rules let a gradient flow."""
    for index, (rule, arg) in enumerate(zip(DERIVATIVES[node.op], node.args, strict=False)):
        if rule is not None:
            yield index, arg


def _simplified(grad: ScoreGrad) -> ScoreGrad:
    """Simplify all expressions together, and drop the scatters of nothing."""
    simplified = simplify_roots(grad.roots, grad.origins)
    roots = iter(simplified.roots)
    dscore = next(roots)
    scatters = [_with_roots(scatter, roots) for scatter in grad.scatters]
    kept = tuple(scatter for scatter in scatters if scatter.value.op != "const" or scatter.value.attr != 0.0)
    return ScoreGrad(dscore, kept, simplified.origins)


def _with_roots(scatter: Scatter, roots: Iterator[Node]) -> Scatter:
    indices = tuple(next(roots) for _ in scatter.indices)
    return Scatter(scatter.buffer, indices, next(roots))
