"""Interval evaluation of a mask over a block of queries and keys, exact on each axis by itself.

A maximal sub-expression of one axis (a leaf) is evaluated on that axis and reduced to its extremes per block, unless
it is monotone in the index, whose extremes lie at the block's corners. What joins two axes is interval arithmetic.
What has no interval rule is decided only in blocks where each leaf below it has a single value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexgen.ir.graph import Axis, Node, input_node, make, topological
from flexgen.ir.origins import Origins
from flexgen.lowering.affine import Linear, depends, split
from flexgen.lowering.block_floats import compare_floats, float_extremes
from flexgen.lowering.bounds import INTEGER_RULES, Box, BoxEvaluator, Extremes
from flexgen.lowering.intervals import Unsolved
from flexgen.lowering.ranges import Range, dtype_range
from flexgen.lowering.symbols import FALSE, INDEX_DTYPE, TRUE, ZERO, Algebra, conjuncts, is_integer, negation, number

SIDES = frozenset({Axis.Q, Axis.KV})
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_MAX_CORNERS = 2  # indices of a table that vary in a block; more corners than four cost more than they tell
_BLOCK = Box(
    {
        input_node("q_idx"): (input_node("q_lo"), input_node("q_hi")),
        input_node("kv_idx"): (input_node("kv_lo"), input_node("kv_hi")),
    }
)
_RESERVED = ("b", "h", "q_idx", "kv_idx", "q_block", "kv_block", "q_slot", "kv_slot", "exists", "live", "full", "block")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A maximal sub-expression that depends on one axis (and perhaps on b and h).

    Attributes:
        name: an identifier, from what the user called it.
        node: the expression.
        axis: Q or KV.
        least, greatest: inputs that stand for its extremes over a block, in the node's dtype; of a bool, whether
            it holds everywhere and whether it holds anywhere. Both are NaN where a NaN lies in the block.
        range: of the values, as far as known.
    """

    name: str
    node: Node
    axis: Axis
    least: Node
    greatest: Node
    range: Range


class BlockEvaluator(BoxEvaluator):
    """Extremes over a block; see the module's docstring.

    Args:
        algebra: builds the expressions.
        taken: names that leaves must avoid.
        origins: the user's names.
    """

    def __init__(self, algebra: Algebra, taken: set[str], origins: Origins | None = None) -> None:
        super().__init__(algebra, _BLOCK)
        self.unsolved: list[Unsolved] = []
        self._taken = {*taken, *_RESERVED}
        self._origins = origins
        self._leaf_of: dict[Node, Leaf] = {}

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(self._leaf_of.values())

    def condition(self, root: Node) -> Extremes:
        """Return whether a bool node holds everywhere in a block, and whether perhaps anywhere."""
        found = self.of(root)
        return found if found is not None else Extremes(FALSE, TRUE)

    def of(self, root: Node) -> Extremes | None:
        for node in _above_leaves(root) if root not in self._known else ():
            if node not in self._known:
                self._known[node] = self._evaluate(node)
        return self._known[root]

    def linear(self, total: Linear) -> Extremes | None:
        """Return the extremes of a sum; the terms of one axis are one leaf, so that they are exact together."""
        merged: list[tuple[Node, int]] = []
        for sides, terms in _by_sides(total).items():
            if len(sides) == 1 and len(terms) > 1:
                merged.append((self.algebra.build(Linear.of(terms)), 1))
            else:
                merged += terms
        return super().linear(Linear.of(merged, total.constant))

    def _evaluate(self, node: Node) -> Extremes | None:
        sides = node.axes & SIDES
        if len(sides) == 1 and not self._is_plain(node):
            return self._leaf_extremes(node)
        if node.dtype == torch.bool and sides:
            return self._bool(node)
        if node.dtype.is_floating_point:
            return float_extremes(node, [self.of(arg) for arg in node.args]) if sides else Extremes(node, node)
        return super()._evaluate(node) or self._unusual_integer(node)

    # One axis.

    def _is_plain(self, node: Node) -> bool:
        """Whether a one-axis expression is exact at the block's corners."""
        if node.dtype == torch.bool:
            plain = node.op in _COMPARISONS and all(is_integer(arg) for arg in node.args)
            return plain and self._is_monotone(self.algebra.linear(node.args[0]) - self.algebra.linear(node.args[1]))
        return is_integer(node) and self._is_monotone(self.algebra.linear(node))

    def _is_monotone(self, total: Linear) -> bool:
        """Whether a sum of one axis rises or falls with the index: it holds the index once, perhaps divided."""
        axis = next((axis for axis in SIDES if depends(total, axis)), None)
        affine = split(total, axis) if axis is not None else None
        if affine is None:
            return False
        if affine.core in self.box.corners:
            return True
        core = affine.core
        if core.op != "floordiv" or core.args[1].axes & SIDES or not self.algebra.ranges.of(core.args[1]).positive:
            return False
        return self._is_monotone(self.algebra.linear(core.args[0]))

    def _leaf_extremes(self, node: Node) -> Extremes:
        leaf = self._leaf_of.get(node) or self._new_leaf(node)
        return Extremes(*(self._wide(end) for end in (leaf.least, leaf.greatest)))

    @staticmethod
    def _wide(node: Node) -> Node:
        return make("cast", node, dtype=INDEX_DTYPE) if is_integer(node) and node.dtype != INDEX_DTYPE else node

    def _new_leaf(self, node: Node) -> Leaf:
        (axis,) = node.axes & SIDES
        name = self._fresh(f"{self._stem(node)}_{axis.value}")
        least, greatest = (input_node(f"{name}_{end}", node.dtype) for end in ("min", "max"))
        known = Range() if node.dtype.is_floating_point else self.algebra.ranges.of(node)
        for end in (least, greatest):
            self.algebra.ranges.learn(str(end.attr), known)
        leaf = self._leaf_of[node] = Leaf(name, node, axis, least, greatest, known)
        return leaf

    def _stem(self, node: Node) -> str:
        named = self._origins.variable(node) if self._origins else None
        if named:
            return named
        value = node.args[0] if node.op == "cast" else node
        return str(value.attr) if value.op == "load" else "part"

    def _fresh(self, stem: str) -> str:
        names = itertools.chain((stem,), (f"{stem}{count}" for count in itertools.count(2)))
        name = next(n for n in names if not {n, f"{n}_min", f"{n}_max"} & self._taken)
        self._taken |= {name, f"{name}_min", f"{name}_max"}
        return name

    # Conditions over both axes.

    def _bool(self, node: Node) -> Extremes:
        return self._ruled(node) or self._uniform(node) or self._unknown(node)

    def _ruled(self, node: Node) -> Extremes | None:
        if node.op in _COMPARISONS and node.args[0].dtype.is_floating_point:
            a, b = (self.of(arg) for arg in node.args)
            return compare_floats(node.op, a, b) if a is not None and b is not None else None
        if node.op == "xor":
            return self._exclusive(node)
        if node.op == "load":
            return self._looked_up(node)
        return self._condition(node)

    def _junction(self, node: Node) -> Extremes | None:
        """Of an `and`, also what its equations say of its other parts.

        Where `doc[q_idx] == doc[kv_idx]`, `q_idx - start[doc[q_idx]] >= kv_idx - start[doc[kv_idx]]` is
        `q_idx >= kv_idx`, which says more of a block that holds several documents.
        """
        found = super()._junction(node)
        if node.op != "and" or found is None:
            return found
        parts = conjuncts(node)
        implied = [simpler for equation in parts for part in parts if (simpler := self._implied(part, equation))]
        ends = [end for end in map(self.of, implied) if end is not None]
        return Extremes(found.lo, self.algebra.conjunction(found.hi, *(end.hi for end in ends)))

    def _implied(self, part: Node, equation: Node) -> Node | None:
        """What a part becomes where an equation of a query's and a key's value holds; None where no simpler."""
        known = _equated(equation)
        if not known or part is equation or not part.axes >= SIDES:
            return None
        found = self.algebra.rebuild(part, known)
        return found if sum(1 for _ in topological(found)) < sum(1 for _ in topological(part)) else None

    def _exclusive(self, node: Node) -> Extremes | None:
        a, b = (self.of(arg) for arg in node.args)
        if a is None or b is None:
            return None
        both, either = self.algebra.conjunction, self.algebra.disjunction
        everywhere = either(both(a.lo, negation(b.hi)), both(b.lo, negation(a.hi)))
        nowhere = either(both(a.lo, b.lo), both(negation(a.hi), negation(b.hi)))
        return Extremes(everywhere, negation(nowhere))

    def _unknown(self, node: Node) -> Extremes:
        self.unsolved.append(Unsolved(node, _why_unknown(node)))
        return Extremes(FALSE, TRUE)

    def _uniform(self, node: Node) -> Extremes | None:
        """Where each leaf has a single value in the block, the condition has a single value too."""
        parts = [part for part in _above_leaves(node) if len(part.axes & SIDES) == 1]
        if any(self._is_the_index(part) for part in parts):
            return None
        ends = {part: self.of(part) for part in parts}
        known = {part: found for part, found in ends.items() if found is not None}
        if len(known) < len(parts):
            return None
        fixed = self.algebra.conjunction(*(self._is_single(part, found) for part, found in known.items()))
        value = self.algebra.rebuild(node, {part: _as(found.lo, part.dtype) for part, found in known.items()})
        return Extremes(self.algebra.conjunction(fixed, value), self.algebra.disjunction(negation(fixed), value))

    def _is_the_index(self, part: Node) -> bool:
        """Whether a part takes another value in each row or column, so that no block has a single one."""
        affine = split(self.algebra.linear(part), next(iter(part.axes & SIDES))) if is_integer(part) else None
        return affine is not None and affine.core in self.box.corners

    def _is_single(self, part: Node, found: Extremes) -> Node:
        if part.dtype == torch.bool:
            return self.algebra.disjunction(found.lo, negation(found.hi))
        if part.dtype.is_floating_point:
            return make("eq", found.lo, found.hi, dtype=torch.bool)
        return self.algebra.eq(found.lo, found.hi)

    # Integers over both axes.

    def _unusual_integer(self, node: Node) -> Extremes | None:
        """What the rules of a box leave out; at last the range of the values."""
        found: Extremes | None = None
        if not node.axes & SIDES or not is_integer(node):
            return None
        if node.op == "load":
            found = self._looked_up(node)
        elif self.algebra.ranges.may_wrap(node):
            found = self._checked(node)
        elif node.op == "mod":
            found = self._remainder(node)
        elif node.op == "mul":
            found = self._product(node)
        return found or self._by_range(node)

    def _by_range(self, node: Node) -> Extremes | None:
        known = self.algebra.ranges.of(node)
        if known.lo is None or known.hi is None:
            return None
        return Extremes(number(known.lo), number(known.hi))

    def _checked(self, node: Node) -> Extremes | None:
        """Arithmetic of narrow integers, done in 64 bits: where it leaves the dtype, anything may come out."""
        if node.dtype == INDEX_DTYPE:
            return None
        found = self._sum(node) if node.op in ("add", "sub", "neg") else self._by_rule(node)
        if found is None:
            return None
        held, algebra = dtype_range(node.dtype), self.algebra
        least, greatest = number(held.lo or 0), number(held.hi or 0)
        fits = algebra.conjunction(algebra.le(least, found.lo), algebra.le(found.hi, greatest))
        return Extremes(algebra.where(fits, found.lo, least), algebra.where(fits, found.hi, greatest))

    def _by_rule(self, node: Node) -> Extremes | None:
        if node.op == "mul":
            return self._product(node)
        rule = INTEGER_RULES.get(node.op)
        return rule(self, node) if rule is not None and node.op != "shl" else None

    def _sum(self, node: Node) -> Extremes | None:
        ends = [found for found in map(self.of, node.args) if found is not None]
        if len(ends) < len(node.args):
            return None
        sub, add = self.algebra.sub, self.algebra.add
        match node.op:
            case "neg":
                return Extremes(sub(ZERO, ends[0].hi), sub(ZERO, ends[0].lo))
            case "sub":
                return Extremes(sub(ends[0].lo, ends[1].hi), sub(ends[0].hi, ends[1].lo))
        return Extremes(add(ends[0].lo, ends[1].lo), add(ends[0].hi, ends[1].hi))

    def _product(self, node: Node) -> Extremes | None:
        a, b = (self.of(arg) for arg in node.args)
        if a is None or b is None or not self.algebra.ranges.of(node).is_finite:
            return None
        corners = [make("mul", x, y, dtype=INDEX_DTYPE) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
        return Extremes(self.algebra.minimum(*corners), self.algebra.maximum(*corners))

    def _remainder(self, node: Node) -> Extremes | None:
        """By a positive divisor that is one value in the block: monotone within a period."""
        value, divisor = self.of(node.args[0]), node.args[1]
        if value is None or divisor.axes & SIDES or not self.algebra.ranges.of(divisor).positive:
            return None
        algebra, divisor = self.algebra, self._wide(divisor)
        quotients = [algebra.build(algebra.floor_quotient(end, divisor)) for end in (value.lo, value.hi)]
        rests = [make("mod", end, divisor, dtype=INDEX_DTYPE) for end in (value.lo, value.hi)]
        same = algebra.eq(*quotients)
        return Extremes(algebra.where(same, rests[0], ZERO), algebra.where(same, rests[1], algebra.offset(divisor, -1)))

    # Tables over both axes.

    def _looked_up(self, node: Node) -> Extremes | None:
        """A table entry, where each index takes at most two neighbouring values in the block: at the corners."""
        ends = [self.of(arg) for arg in node.args]
        known = [found for found in ends if found is not None]
        moving = [found for found in known if not found.is_single]
        if len(known) < len(ends) or len(moving) > _MAX_CORNERS:
            return None
        if any(self._is_the_index(arg) for arg in node.args if len(arg.axes & SIDES) == 1):
            return None
        near = self.algebra.conjunction(*(self.algebra.le(end.hi, self.algebra.offset(end.lo, 1)) for end in moving))
        choices = [(end.lo,) if end.is_single else (end.lo, end.hi) for end in known]
        corners = [
            make(
                "load",
                *(_as(i, arg.dtype) for i, arg in zip(place, node.args, strict=True)),
                attr=node.attr,
                dtype=node.dtype,
            )
            for place in itertools.product(*choices)
        ]
        return self._of_corners(node, near, corners)

    def _of_corners(self, node: Node, near: Node, corners: list[Node]) -> Extremes | None:
        algebra = self.algebra
        if node.dtype == torch.bool:
            everywhere = algebra.conjunction(near, *corners)
            return Extremes(everywhere, algebra.disjunction(negation(near), *corners))
        limits = self._by_range(node)
        if limits is None:
            return None
        wide = [self._wide(corner) for corner in corners]
        return Extremes(
            algebra.where(near, algebra.minimum(*wide), limits.lo),
            algebra.where(near, algebra.maximum(*wide), limits.hi),
        )


def _above_leaves(root: Node) -> Iterator[Node]:
    """Yield the nodes under the root, arguments first, without going below those of one axis or none."""
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if len(node.axes & SIDES) == 2:
                stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


def _equated(condition: Node) -> dict[Node, Node]:
    """Return the key's side of an equation and what it equals on the query's side; nothing of other conditions."""
    if condition.op != "eq":
        return {}
    a, b = (arg.args[0] if arg.op == "cast" else arg for arg in condition.args)
    if b.axes & SIDES == {Axis.Q}:
        a, b = b, a
    apart = a.axes & SIDES == {Axis.Q} and b.axes & SIDES == {Axis.KV}
    return {b: a} if apart and a.dtype == b.dtype and is_integer(a) else {}


def _by_sides(total: Linear) -> dict[frozenset[Axis], list[tuple[Node, int]]]:
    groups: dict[frozenset[Axis], list[tuple[Node, int]]] = {}
    for atom, coefficient in total:
        groups.setdefault(atom.axes & SIDES, []).append((atom, coefficient))
    return groups


def _as(node: Node, dtype: torch.dtype) -> Node:
    return node if node.dtype == dtype else make("cast", node, dtype=dtype)


def _why_unknown(node: Node) -> str:
    if node.op == "load":
        return f"{node.attr} is read at a query and a key, so its blocks are not known without reading all of it"
    if node.op in _COMPARISONS:
        return "an operation in it has no interval rule"
    return f"{node.op} has no interval rule"
