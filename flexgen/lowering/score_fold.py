"""Takes constant factors out of a score_mod: one before it joins the softmax scale, one after it joins log2(e)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flexgen.ir.graph import Graph, Node, make, topological
from flexgen.ir.origins import Origin, Origins

TINY = 1e-30  # a factor at least this far from 0 and from infinity leaves scores finite


@dataclass(frozen=True, slots=True)
class ScoreFold:
    """A score_mod as `after * inner(before * score)`, up to the rounding of float32.

    Attributes:
        graph: the inner mod.
        before: the factor of every use of the score.
        after: the positive factor of the result: it scales all scores alike, so that their order stays.
        stands_for: for each node that was made, the node of the user's mod that has its value.
        root: the user's root, whose line computes the inner mod too.
    """

    graph: Graph
    before: float
    after: float
    stands_for: tuple[tuple[Node, Node], ...]
    root: Node

    def origins(self, origins: Origins) -> Origins:
        """Return the origins, extended to the inner mod's nodes."""
        line = tuple(Origin(None, origin.span) for origin in origins.of(self.root))
        table = {self.graph.root: (*origins.of(self.graph.root), *line)} | dict(origins.table)
        for new, old in self.stands_for:
            table[new] = tuple(dict.fromkeys((*origins.of(new), *origins.of(old), *table.get(new, ()))))
        return Origins(MappingProxyType(table))


def fold_score(graph: Graph, *, constant_scale: bool) -> ScoreFold:
    """Take the factors out of a score_mod that computes in float32; others are left as they are.

    Args:
        constant_scale: the softmax scale is a constant, which a factor before the mod can join.
    """
    if graph.root.dtype != torch.float32:
        return ScoreFold(graph, 1.0, 1.0, (), graph.root)
    root, after = _without_factor(graph.root)
    built = {node: node for node in topological(root)}
    users = [node for node in built if any(arg.attr == "score" and arg.op == "input" for arg in node.args)]
    before = 1.0
    if constant_scale and len(users) == 1 and users[0].dtype == torch.float32:
        score, before = _factor(users[0])
        built = _replace(root, users[0], score) if before != 1.0 else built
    stands_for = tuple((new, old) for old, new in built.items() if new is not old and new.args)
    return ScoreFold(dataclasses.replace(graph, root=built[root]), before, after, stands_for, graph.root)


def _without_factor(root: Node) -> tuple[Node, float]:
    """Return the root without the positive constants that it is multiplied or divided by, and their product."""
    after = 1.0
    while root.dtype == torch.float32:
        inner, factor = _factor(root)
        if factor <= 0.0 or inner is root:
            break
        root, after = inner, after * factor
    return root, after


def _factor(node: Node) -> tuple[Node, float]:
    """Return x and c of a node that is x * c or x / c, c a constant of sane size; else node and 1."""
    if node.op not in ("mul", "div"):
        return node, 1.0
    sides = [node.args] if node.op == "div" else [node.args, node.args[::-1]]
    for value, constant in sides:
        number = constant.attr
        if constant.op != "const" or not isinstance(number, float) or value.dtype != node.dtype:
            continue
        if TINY < abs(number) < 1.0 / TINY:
            return value, number if node.op == "mul" else 1.0 / number
    return node, 1.0


def _replace(root: Node, old: Node, new: Node) -> dict[Node, Node]:
    """Return what each node under the root becomes when one of them is replaced."""
    built: dict[Node, Node] = {}
    for node in topological(root):
        args = [built[arg] for arg in node.args]
        built[node] = new if node is old else make(node.op, *args, attr=node.attr, dtype=node.dtype)
    return built
