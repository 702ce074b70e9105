"""Applies the rules of `rules.py` to expressions, bottom-up, until none applies; the values computed stay the same."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flexgen.errors import InternalError
from flexgen.ir.graph import Graph, Mods, Node, make, topological
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.ranges import Ranges
from flexgen.ir.rule import Rule
from flexgen.ir.rules import RULES
from flexgen.ir.verify import used_captures, verify

_MOST_ROUNDS = 1000  # each round but the last makes the graph simpler; more can only be a loop among the rules
_MOST_REWRITES = 1000  # of one node in one round
_LEAVES = frozenset({"input", "const", "scalar"})  # shared by all places that use them, so they take no origin


@dataclass(frozen=True, slots=True)
class Simplified:
    """What `simplify` returns.

    Attributes:
        mods: the simplified mods, which declare only the buffers and scalars that are still used.
        origins: origins of their nodes; a node that replaced others carries theirs too.
        fired: name and count of each rule that was applied, in the order of the rule table.
    """

    mods: Mods
    origins: Origins
    fired: tuple[tuple[str, int], ...]


def simplify(mods: Mods, origins: Origins | None = None) -> Simplified:
    """Simplify both mods, keeping every value to the last bit.

    Raises:
        InternalError: the mods, or what the rules made of them, break the rules of the IR.
    """
    verify(mods)
    rewriter = _Rewriter(origins or Origins())
    roots = tuple(graph.root for graph in mods.graphs())
    roots = rewriter.to_the_end(roots, lambda simpler, why: verify(_with_roots(mods, simpler), why))
    return Simplified(_with_roots(mods, roots), rewriter.origins_of(roots), rewriter.fired())


@dataclass(frozen=True, slots=True)
class SimplifiedRoots:
    """What `simplify_roots` returns: each root simplified, in order, and the origins of the nodes under them."""

    roots: tuple[Node, ...]
    origins: Origins


def simplify_roots(roots: tuple[Node, ...], origins: Origins | None = None) -> SimplifiedRoots:
    """Simplify expressions that may share nodes, keeping every value to the last bit; what is shared stays shared.

    Raises:
        InternalError: the rules do not come to an end.
    """
    rewriter = _Rewriter(origins or Origins())
    simpler = rewriter.to_the_end(roots, lambda *_: None)
    return SimplifiedRoots(simpler, rewriter.origins_of(simpler))


def _rules_by_op() -> Mapping[str, tuple[Rule, ...]]:
    table: defaultdict[str, list[Rule]] = defaultdict(list)
    for rule in RULES:
        for op in rule.ops:
            table[op].append(rule)
    return MappingProxyType({op: tuple(rules) for op, rules in table.items()})


_RULES_BY_OP = _rules_by_op()


class _Rewriter:
    """Rewrites graphs and keeps the origins and the counts of what fired."""

    def __init__(self, origins: Origins) -> None:
        self._origins = dict(origins.table)
        self._ranges = Ranges()
        self._counts: Counter[str] = Counter()

    def fired(self) -> tuple[tuple[str, int], ...]:
        names = dict.fromkeys(rule.name for rule in RULES)
        return tuple((name, self._counts[name]) for name in names if self._counts[name])

    def origins_of(self, roots: tuple[Node, ...]) -> Origins:
        nodes = topological(*roots)
        return Origins(MappingProxyType({node: self._origins[node] for node in nodes if node in self._origins}))

    def to_the_end(self, roots: tuple[Node, ...], check: Callable[[tuple[Node, ...], str], None]) -> tuple[Node, ...]:
        """Return the roots rewritten until no rule applies; `check` sees them, and what fired, after each round."""
        for number in range(1, _MOST_ROUNDS + 1):
            before = self._counts.copy()
            simpler = self._round(roots)
            fired = ", ".join(self._counts - before) or "none"
            check(simpler, f"round {number} of the simplifier broke it, with the rules: {fired}")
            if simpler == roots:
                return roots
            roots = simpler
        raise InternalError("the simplifier's rules do not come to an end", why=f"fired: {self.fired()}")

    def _round(self, roots: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the roots with each node under them rewritten once, arguments before users."""
        replaced: dict[Node, Node] = {}
        for node in topological(*roots):
            args = tuple(replaced[arg] for arg in node.args)
            rebuilt = node if args == node.args else make(node.op, *args, attr=node.attr, dtype=node.dtype)
            self._carry_origins(node, rebuilt)
            replaced[node] = self._rewrite(rebuilt)
        return tuple(replaced[root] for root in roots)

    def _rewrite(self, node: Node) -> Node:
        """Apply rules to one node until none applies."""
        for _ in range(_MOST_REWRITES):
            found = self._first_rewrite(node)
            if found is None:
                return node
            rule, replacement = found
            self._counts[rule.name] += 1
            self._carry_origins(node, replacement)
            node = replacement
        raise InternalError(f"the simplifier's rules rewrite {node.op!r} without end")

    def _first_rewrite(self, node: Node) -> tuple[Rule, Node] | None:
        for rule in _RULES_BY_OP.get(node.op, ()):
            replacement = rule.rewrite(node, self._ranges)
            if replacement is not None:
                return rule, replacement
        return None

    def _carry_origins(self, old: Node, new: Node) -> None:
        """Add the old node's origins to the new one's; new nodes inside `new` get its places, not its name."""
        carried = self._origins.get(old, ())
        if old is new or not carried:
            return
        self._add_origins(new, carried)
        unnamed = tuple(Origin(None, origin.span) for origin in carried if origin.span is not None)
        for arg in new.args:
            if arg not in self._origins:
                self._add_origins(arg, unnamed)

    def _add_origins(self, node: Node, added: tuple[Origin, ...]) -> None:
        if node.op not in _LEAVES and added:
            self._origins[node] = tuple(dict.fromkeys((*self._origins.get(node, ()), *added)))


def _with_roots(mods: Mods, roots: tuple[Node, ...]) -> Mods:
    graphs = {graph.kind: _with_root(graph, root) for graph, root in zip(mods.graphs(), roots, strict=True)}
    return Mods(graphs.get("score"), graphs.get("mask"))


def _with_root(graph: Graph, root: Node) -> Graph:
    """Return the graph with another root, declaring only what is still used."""
    used = used_captures(list(topological(root)))
    buffers = tuple(buffer for buffer in graph.buffers if buffer.name in used)
    scalars = tuple(scalar for scalar in graph.scalars if scalar.name in used)
    return dataclasses.replace(graph, root=root, buffers=buffers, scalars=scalars)
