"""Bounds over a tile: extremes of a row's interval over the tile's box, at its corners or reduced over its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from flexgen.ir.graph import Axis, Node, input_node, topological
from flexgen.lowering.affine import Linear
from flexgen.lowering.intervals import Interval, RowSegment
from flexgen.lowering.symbols import FALSE, KV_LEN, Q_LEN, ZERO, Algebra, is_integer, is_small, negation, number

Reduce = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a tile's range, in logical indices, not clamped to the axis.

    Attributes:
        node: an int64 expression; over the tile's corners and `b` where `reduce` is None ("closed form"), else one
            value per row of the tile, over the row's own (b, h, index).
        reduce: how the kernel reduces the rows' values, over rows that exist.
    """

    node: Node
    reduce: Reduce | None = None


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """What a tile of rows visits of one segment.

    Attributes:
        visit_lo, visit_hi: every live index of the tile's rows in this segment lies in [visit_lo, visit_hi).
        full_lo, full_hi: all indices in [full_lo, full_hi) are live for all rows; None when nothing is known.
        exact: each row's live set in this segment is exactly an interval.
        because: the row's interval, for people.
    """

    visit_lo: Bound
    visit_hi: Bound
    full_lo: Bound | None
    full_hi: Bound | None
    exact: bool
    because: str

    @property
    def bounds(self) -> tuple[Bound, ...]:
        return tuple(b for b in (self.visit_lo, self.visit_hi, self.full_lo, self.full_hi) if b is not None)


@dataclass(frozen=True, slots=True)
class Box:
    """The rows of a tile: for each input that varies in it, its least and its greatest value, both included.

    Inputs that are not listed have one value in the tile.
    """

    corners: Mapping[Node, tuple[Node, Node]]

    @classmethod
    def of_tile(cls, solved: Axis, *, single_head: bool = False) -> Box:
        """The box of a tile of query rows (solved for KV) or of key rows (solved for Q)."""
        name, lo, hi = ("q_idx", "q_lo", "q_hi") if solved is Axis.KV else ("kv_idx", "kv_lo", "kv_hi")
        corners = {input_node(name): (input_node(lo), input_node(hi))}
        if not single_head:
            corners[input_node("h")] = (input_node("h_lo"), input_node("h_hi"))
        return cls(MappingProxyType(corners))


@dataclass(frozen=True, slots=True)
class Extremes:
    """The least and greatest value over a box; for a condition, whether it holds everywhere and whether anywhere."""

    lo: Node
    hi: Node

    @property
    def is_single(self) -> bool:
        return self.lo is self.hi


class BoxEvaluator:
    """Symbolic interval evaluation over a box: sound always, exact for what is monotone."""

    def __init__(self, algebra: Algebra, box: Box) -> None:
        self.algebra = algebra
        self.box = box
        self._axes = frozenset[Axis]().union(*(corner.axes for corner in box.corners))
        self._known: dict[Node, Extremes | None] = {}

    def of(self, root: Node) -> Extremes | None:
        """Return the extremes of an integer or bool node; None where an operation has no rule."""
        for node in topological(root) if root not in self._known else ():
            if node not in self._known:
                self._known[node] = self._evaluate(node)
        return self._known[root]

    def _evaluate(self, node: Node) -> Extremes | None:
        if node in self.box.corners:
            return Extremes(*self.box.corners[node])
        if not node.axes & self._axes:
            same = self.algebra.build(self.algebra.linear(node)) if is_integer(node) else node
            return Extremes(same, same)
        if any(part.dtype.is_floating_point for part in (node, *node.args)):
            return None
        return self._condition(node) if node.dtype == torch.bool else self._integer(node)

    # Integers.

    def _integer(self, node: Node) -> Extremes | None:
        rule = INTEGER_RULES.get(node.op)
        if rule is None or self.algebra.ranges.may_wrap(node):
            return None
        return rule(self, node)

    def linear(self, total: Linear) -> Extremes | None:
        """Return the extremes of a sum, each atom at its own."""
        ends = [(self.of(atom), c) for atom, c in total]
        lo = hi = Linear(constant=total.constant)
        for found, c in ends:
            if found is None:
                return None
            least, greatest = (found.lo, found.hi) if c > 0 else (found.hi, found.lo)
            lo = lo + self.algebra.linear(least).scaled(c)
            hi = hi + self.algebra.linear(greatest).scaled(c)
        return Extremes(
            self.algebra.build(self.algebra.cancel_mods(lo)), self.algebra.build(self.algebra.cancel_mods(hi))
        )

    # Conditions: `lo` is "for all rows", `hi` is "for some row, perhaps".

    def _condition(self, node: Node) -> Extremes | None:
        match node.op:
            case "and" | "or":
                return self._junction(node)
            case "not":
                found = self.of(node.args[0])
                return Extremes(negation(found.hi), negation(found.lo)) if found else None
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne" if is_integer(node.args[0]):
                return self._comparison(node.op, *node.args)
            case "where":
                return self._where(node)
        return None

    def _junction(self, node: Node) -> Extremes | None:
        parts = [found for found in map(self.of, node.args) if found is not None]
        if len(parts) < len(node.args):
            return None
        join = self.algebra.conjunction if node.op == "and" else self.algebra.disjunction
        return Extremes(join(*(part.lo for part in parts)), join(*(part.hi for part in parts)))

    def _comparison(self, op: str, a: Node, b: Node) -> Extremes | None:
        if op in ("gt", "ge"):
            return self._comparison("lt" if op == "gt" else "le", b, a)
        difference = self.algebra.linear(a) - self.algebra.linear(b)
        found = self.linear(difference.plus(-1) if op == "le" else difference)
        if found is None:
            return None
        least, greatest = self.algebra.linear(found.lo), self.algebra.linear(found.hi)
        if op in ("lt", "le"):
            return Extremes(self.algebra.negative(greatest), self.algebra.negative(least))
        return self._equality(op, least, greatest)

    def _equality(self, op: str, least: Linear, greatest: Linear) -> Extremes:
        """a == b somewhere only if 0 is among the differences, and everywhere only if they all are 0."""
        negative = self.algebra.negative
        ends = (least.plus(-1), greatest.scaled(-1).plus(-1))
        somewhere = self.algebra.conjunction(*(negative(end) for end in ends))
        opposite = (greatest.plus(-1), least.scaled(-1).plus(-1))
        everywhere = self.algebra.conjunction(*(negative(end) for end in opposite))
        if op == "eq":
            return Extremes(everywhere, somewhere)
        return Extremes(negation(somewhere), negation(everywhere))

    def _where(self, node: Node) -> Extremes | None:
        condition, a, b = (self.of(arg) for arg in node.args)
        if condition is None or a is None or b is None:
            return None
        if node.dtype == torch.bool:
            least, greatest = self.algebra.conjunction(a.lo, b.lo), self.algebra.disjunction(a.hi, b.hi)
        else:
            least, greatest = self.algebra.minimum(a.lo, b.lo), self.algebra.maximum(a.hi, b.hi)
        return Extremes(self.chosen(condition, a.lo, least, b.lo), self.chosen(condition, a.hi, greatest, b.hi))

    def chosen(self, condition: Extremes, when_all: Node, mixed: Node, when_none: Node) -> Node:
        """Select by whether a condition holds for all rows, for some perhaps, or for none."""
        where = self.algebra.where
        if mixed is when_none:
            return where(condition.lo, when_all, when_none)
        if mixed is when_all or condition.is_single:
            return where(condition.hi, when_all, when_none)
        return where(condition.lo, when_all, where(condition.hi, mixed, when_none))


IntegerRule = Callable[[BoxEvaluator, Node], Extremes | None]


def _sum(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    total = evaluator.algebra.linear(node)
    whole = total.atom is not None and (total.atom is node or total.atom.args == (node,))
    return None if whole else evaluator.linear(total)


def _product(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    """Sums first (one factor is constant); else factors that are not negative."""
    found = _sum(evaluator, node)
    if found is not None:
        return found
    a, b = (evaluator.of(arg) for arg in node.args)
    if a is None or b is None or not all(evaluator.algebra.ranges.of(arg).non_negative for arg in node.args):
        return None
    ends = [evaluator.algebra.product(evaluator.algebra.linear(x), y) for x, y in ((a.lo, b.lo), (a.hi, b.hi))]
    if ends[0] is None or ends[1] is None:
        return None
    return Extremes(*(evaluator.algebra.build(end) for end in ends if end is not None))


def _quotient(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    """Monotone in the dividend, for a divisor that is positive and the same for all rows."""
    value, divisor = (evaluator.of(arg) for arg in node.args)
    rounds_down = node.op == "floordiv" or evaluator.algebra.ranges.of(node.args[0]).non_negative
    if value is None or divisor is None or not divisor.is_single or not rounds_down:
        return None
    if not evaluator.algebra.ranges.of(node.args[1]).positive:
        return None
    build, quotient = evaluator.algebra.build, evaluator.algebra.floor_quotient
    return Extremes(build(quotient(value.lo, divisor.lo)), build(quotient(value.hi, divisor.lo)))


def _remainder(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    """Within one period a remainder is monotone; across periods it takes any value."""
    algebra, divisor = evaluator.algebra, evaluator.algebra.linear(node.args[1])
    value = evaluator.of(node.args[0])
    if value is None or not divisor.is_constant or divisor.constant <= 0:
        return None
    period = divisor.constant
    first, last = (algebra.build(algebra.floordiv(algebra.linear(end), period)) for end in (value.lo, value.hi))
    same = algebra.eq(first, last)
    lo, hi = algebra.mod(value.lo, period), algebra.mod(value.hi, period)
    return Extremes(algebra.where(same, lo, ZERO), algebra.where(same, hi, number(period - 1)))


def _extreme(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    a, b = (evaluator.of(arg) for arg in node.args)
    if a is None or b is None:
        return None
    choose = evaluator.algebra.minimum if node.op == "min" else evaluator.algebra.maximum
    return Extremes(choose(a.lo, b.lo), choose(a.hi, b.hi))


def _abs(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    value = evaluator.of(node.args[0])
    if value is None:
        return None
    algebra = evaluator.algebra
    opposite = (algebra.sub(ZERO, value.hi), algebra.sub(ZERO, value.lo))
    return Extremes(algebra.maximum(value.lo, opposite[0], ZERO), algebra.maximum(value.hi, opposite[1]))


def _shifted_right(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    shift = evaluator.algebra.linear(node.args[1])
    value = evaluator.of(node.args[0])
    if value is None or not shift.is_constant or not 0 <= shift.constant < 62:
        return None
    algebra, divisor = evaluator.algebra, 1 << shift.constant
    return Extremes(*(algebra.build(algebra.floordiv(algebra.linear(end), divisor)) for end in (value.lo, value.hi)))


def _cast(evaluator: BoxEvaluator, node: Node) -> Extremes | None:
    if is_integer(node.args[0]):
        return evaluator.of(node.args[0])
    value = evaluator.of(node.args[0])
    if value is None:
        return None
    one = number(1)
    return Extremes(evaluator.algebra.where(value.lo, one, ZERO), evaluator.algebra.where(value.hi, one, ZERO))


INTEGER_RULES: Mapping[str, IntegerRule] = MappingProxyType(
    {
        **dict.fromkeys(("add", "sub", "neg", "shl"), _sum),
        "mul": _product,
        **dict.fromkeys(("floordiv", "truncdiv"), _quotient),
        "mod": _remainder,
        **dict.fromkeys(("min", "max"), _extreme),
        "abs": _abs,
        "shr": _shifted_right,
        "where": BoxEvaluator._where,
        "cast": _cast,
    }
)


class TileBounds:
    """Turns the intervals of a row into the bounds of a tile.

    Args:
        solved: the axis of the intervals.
        box: the rows of a tile.
    """

    def __init__(self, algebra: Algebra, solved: Axis, box: Box) -> None:
        self.algebra = algebra
        self.length = KV_LEN if solved is Axis.KV else Q_LEN
        self._evaluator = BoxEvaluator(algebra, box)

    def segment(self, segment: RowSegment, because: str) -> SegmentBounds:
        visit_lo, visit_hi = self._visited(segment.outer)
        full = self._full(segment.inner) if segment.inner else None
        return SegmentBounds(
            visit_lo, visit_hi, full[0] if full else None, full[1] if full else None, segment.is_exact, because
        )

    def _visited(self, outer: Interval) -> tuple[Bound, Bound]:
        """Where the guard holds nowhere, the range is empty: it ends at 0."""
        where, guard = self.algebra.where, self._evaluator.of(outer.guard)
        lo, hi = outer.lo or ZERO, outer.hi or self.length
        if guard is None:
            start = where(outer.guard, lo, self.length)
            return Bound(start, "min") if outer.lo else Bound(ZERO), Bound(where(outer.guard, hi, ZERO), "max")
        found = self._extreme(hi, "max")
        if found.reduce is None:
            return self._extreme(lo, "min"), Bound(where(guard.hi, found.node, ZERO))
        return self._extreme(lo, "min"), Bound(where(outer.guard, hi, ZERO), "max")

    def _full(self, inner: Interval) -> tuple[Bound, Bound] | None:
        where, guard = self.algebra.where, self._evaluator.of(inner.guard)
        if guard is not None and guard.lo is FALSE:
            return None
        lo, hi = self._extreme(inner.lo or ZERO, "max"), inner.hi or self.length
        found = self._extreme(hi, "min")
        if guard is None or found.reduce:
            return lo, Bound(where(inner.guard, hi, ZERO), "min")
        return lo, Bound(where(guard.lo, found.node, ZERO))

    def _extreme(self, node: Node, reduce: Reduce) -> Bound:
        found = self._closed(node, reduce)
        if found is None or not is_small(found, _MAX_CLOSED_SIZE):
            return Bound(node, reduce)
        return Bound(found)

    def _closed(self, node: Node, reduce: Reduce) -> Node | None:
        """Look through choices down to plain expressions, as an end is clamped to the axis in the end anyway."""
        if node.op not in ("where", "min", "max"):
            found = self._evaluator.of(node)
            return None if found is None else found.lo if reduce == "min" else found.hi
        a, b = (self._closed(arg, reduce) for arg in node.args[-2:])
        if a is None or b is None:
            return None
        if node.op != "where":
            return self._clamped(node.op, a, b)
        condition = self._evaluator.of(node.args[0])
        if condition is None:
            return None
        return self._evaluator.chosen(condition, a, self._clamped(reduce, a, b), b)

    def _clamped(self, op: str, a: Node, b: Node) -> Node:
        """The min or max of two ends that are clamped to [0, length] afterwards."""
        outer, inner = (ZERO, self.length) if op == "min" else (self.length, ZERO)
        if outer in (a, b):
            return outer
        if inner in (a, b):
            return b if a is inner else a
        return self.algebra.minimum(a, b) if op == "min" else self.algebra.maximum(a, b)


# A closed form of more nodes than this is no longer readable, nor cheaper than reducing over the tile's rows.
_MAX_CLOSED_SIZE = 120
