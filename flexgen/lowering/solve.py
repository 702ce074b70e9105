"""Solve a mask for one of its indices: which intervals of it are live, as functions of everything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch

from flexgen.ir.graph import Axis, Node, input_node, make, topological
from flexgen.lowering.affine import Affine, Linear, depends, split
from flexgen.lowering.intervals import EVERYTHING, NOTHING, IntervalAlgebra, RowSet, unknown
from flexgen.lowering.ranges import dtype_range
from flexgen.lowering.symbols import Algebra, is_integer, number

# Ends beyond this are clamped before arithmetic on them could wrap; it is far outside of any axis.
_FAR = 2**60
_MAX_DEPTH = 60
_MAX_LEAVES = 600

_LENGTHS = {Axis.KV: ("kv_idx", "KV_LEN"), Axis.Q: ("q_idx", "Q_LEN")}


def solve(mask: Node, axis: Axis, algebra: Algebra) -> RowSet:
    """Return the live set of a row of the mask along `axis` (KV for a query's keys, Q for a key's queries).

    Args:
        mask: a bool node.
        axis: the axis that is solved for; the ends of the intervals do not depend on it.
        algebra: builds the ends, and knows the ranges of scalars.
    """
    return _Solver(axis, algebra).condition(mask, True)


class _Solver:
    def __init__(self, axis: Axis, algebra: Algebra) -> None:
        index, length = _LENGTHS[axis]
        self.axis = axis
        self.algebra = algebra
        self.sets = IntervalAlgebra(algebra, input_node(index), input_node(length))
        self._solved: dict[tuple[Node, bool], RowSet] = {}
        self._depth = 0

    def condition(self, node: Node, holds: bool) -> RowSet:
        """The indices for which a bool node is `holds`."""
        key = (node, holds)
        if key not in self._solved:
            self._solved[key] = self._guarded_effort(node, holds)
        return self._solved[key]

    def _guarded_effort(self, node: Node, holds: bool) -> RowSet:
        if self._depth > _MAX_DEPTH or len(self._solved) > _MAX_LEAVES:
            return unknown(node, "the mask is too large to solve in full")
        self._depth += 1
        try:
            return self._condition(node, holds)
        finally:
            self._depth -= 1

    def _condition(self, node: Node, holds: bool) -> RowSet:
        if self.axis not in node.axes:
            return self._guard(node, holds)
        match node.op:
            case "not":
                return self.condition(node.args[0], not holds)
            case "and" | "or":
                return self._junction(node, holds)
            case "xor" | "ne" if node.args[0].dtype == torch.bool:
                return self._exclusive(node.args[0], node.args[1], holds)
            case "eq" if node.args[0].dtype == torch.bool:
                return self._exclusive(node.args[0], node.args[1], not holds)
            case "where":
                return self._select(node, lambda value: self.condition(value, holds))
            case "cast" if is_integer(node.args[0]):
                return self._compare("ne" if holds else "eq", node.args[0], number(0), node)
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne":
                return self._compare(node.op if holds else _OPPOSITE[node.op], node.args[0], node.args[1], node)
        return unknown(node, _why_unsolved(node, self.axis))

    def _guard(self, node: Node, holds: bool) -> RowSet:
        return self.sets.guarded(node if holds else self.algebra.rebuild(make("not", node, dtype=torch.bool)))

    def _junction(self, node: Node, holds: bool) -> RowSet:
        """And and or, whole chains at once; a negation swaps them."""
        parts = self._chain(node)
        if (node.op == "and") == holds:
            return reduce(
                self.sets.intersect, (self.condition(part, holds) for part in self._specialised(parts, holds))
            )
        return reduce(self.sets.union, (self.condition(part, holds) for part in parts))

    def _specialised(self, parts: list[Node], holds: bool) -> list[Node]:
        """Where all parts must hold, use what one equates to simplify the others.

        From `q_idx // 8 == kv_idx // 8` follows that `kv_idx % 8` is `kv_idx - q_idx // 8 * 8`.
        """
        for place, part in enumerate(parts):
            known = self._equated(part) if part.op == ("eq" if holds else "ne") else {}
            if known:
                parts = [p if i == place else self._replaced(p, known) for i, p in enumerate(parts)]
        return parts

    def _equated(self, part: Node) -> dict[Node, Node]:
        """What an equation says of the one atom that depends on the index, and of its remainder."""
        if not all(is_integer(arg) for arg in part.args):
            return {}
        affine = split(self.algebra.linear(part.args[0]) - self.algebra.linear(part.args[1]), self.axis)
        if affine is None or abs(affine.coefficient) != 1 or affine.core is self.sets.index:
            return {}
        value = affine.rest.scaled(-affine.coefficient)
        known = {affine.core: self.algebra.build(value)}
        if affine.core.op == "cast":
            known[affine.core.args[0]] = make("cast", self.algebra.build(value), dtype=affine.core.args[0].dtype)
        if affine.core.op == "floordiv" and affine.core.args[1].op == "const":
            dividend, divisor = affine.core.args
            rest = self.algebra.linear(dividend) - value.scaled(int(divisor.attr or 0))
            known[make("mod", dividend, divisor, dtype=dividend.dtype)] = self.algebra.build(rest)
        return known

    def _replaced(self, part: Node, known: dict[Node, Node]) -> Node:
        return self.algebra.rebuild(part, known) if any(node in known for node in topological(part)) else part

    def _chain(self, node: Node) -> list[Node]:
        """The operands of a chain of one op, those free of the axis joined into one and put first."""
        parts: list[Node] = []
        stack = [node]
        while stack:
            part = stack.pop()
            if part.op == node.op and self.axis in part.axes:
                stack.extend(reversed(part.args))
            else:
                parts.append(part)
        free = [part for part in parts if self.axis not in part.axes]
        bound = [part for part in parts if self.axis in part.axes]
        join = self.algebra.conjunction if node.op == "and" else self.algebra.disjunction
        return [join(*free), *bound] if free else bound

    def _exclusive(self, a: Node, b: Node, holds: bool) -> RowSet:
        """Exactly one of two conditions, or not."""
        union, meet = self.sets.union, self.sets.intersect
        return union(
            meet(self.condition(a, True), self.condition(b, not holds)),
            meet(self.condition(a, False), self.condition(b, holds)),
        )

    def _select(self, node: Node, of: Callable[[Node], RowSet]) -> RowSet:
        condition, a, b = node.args
        return self.sets.union(
            self.sets.intersect(self.condition(condition, True), of(a)),
            self.sets.intersect(self.condition(condition, False), of(b)),
        )

    # Comparisons.

    def _compare(self, op: str, a: Node, b: Node, whole: Node) -> RowSet:
        if not (is_integer(a) and is_integer(b)):
            return self._compare_floating(op, a, b, whole)
        difference = self.algebra.cancel_mods(self.algebra.linear(a) - self.algebra.linear(b))
        match op:
            case "lt":
                return self._negative(difference, whole)
            case "le":
                return self._negative(difference.plus(-1), whole)
            case "gt":
                return self._negative(difference.scaled(-1), whole)
            case "ge":
                return self._negative(difference.scaled(-1).plus(-1), whole)
        reverse = difference.scaled(-1)
        if op == "eq":
            parts = (self._negative(difference.plus(-1), whole), self._negative(reverse.plus(-1), whole))
            return self.sets.intersect(*parts)
        return self.sets.union(self._negative(difference, whole), self._negative(reverse, whole))

    def _compare_floating(self, op: str, a: Node, b: Node, whole: Node) -> RowSet:
        """An integer that was promoted to a floating dtype, against a constant: rounding keeps the order."""
        if a.op == "const":
            return self._compare_floating(_MIRRORED[op], b, a, whole)
        integer = a.args[0] if a.op == "cast" and is_integer(a.args[0]) else None
        if integer is None or b.op != "const" or op in ("eq", "ne"):
            return unknown(whole, "it compares floating-point values")
        limit = _first_not_below(float(b.attr or 0), a.dtype, strict=op in ("le", "gt"))
        if limit is None:
            return unknown(whole, "it compares floating-point values")
        return self._compare("lt" if op in ("lt", "le") else "ge", integer, number(limit), whole)

    def _negative(self, total: Linear, whole: Node) -> RowSet:
        """The indices for which total < 0."""
        found = self.algebra.range_of(total)
        if found.hi is not None and found.hi < 0:
            return EVERYTHING
        if found.lo is not None and found.lo >= 0:
            return NOTHING
        if not depends(total, self.axis):
            return self.sets.guarded(self.algebra.negative(total))
        affine = split(total, self.axis)
        if affine is None:
            return unknown(whole, "its sides depend on the index in two ways at once")
        return self._negative_affine(affine, whole)

    def _negative_affine(self, affine: Affine, whole: Node) -> RowSet:
        """coefficient * core < -rest, divided by the coefficient."""
        if affine.coefficient > 0:
            limit = self.algebra.floordiv(affine.rest, affine.coefficient).scaled(-1)
            return self._below(affine.core, limit, whole)
        limit = self.algebra.floordiv(affine.rest, -affine.coefficient).plus(1)
        return self._at_least(affine.core, limit, whole)

    def _below(self, core: Node, limit: Linear, whole: Node) -> RowSet:
        """The indices for which core < limit."""
        if core is self.sets.index:
            end = self._end(limit)
            return self.sets.interval(None, end) if end else unknown(whole, _TOO_LARGE)
        return self._inverted(core, limit, whole, below=True)

    def _at_least(self, core: Node, limit: Linear, whole: Node) -> RowSet:
        """The indices for which core >= limit."""
        if core is self.sets.index:
            end = self._end(limit)
            return self.sets.interval(end, None) if end else unknown(whole, _TOO_LARGE)
        return self._inverted(core, limit, whole, below=False)

    def _inverted(self, core: Node, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """Undo the core's outermost operation: the indices for which core < limit (else core >= limit)."""
        args = core.args
        match core.op:
            case "floordiv" | "truncdiv" | "shr":
                return self._inverted_division(core, limit, whole, below=below)
            case "mul":
                return self._inverted_product(core, limit, whole, below=below)
            case "abs":
                return self._inverted_abs(self.algebra.linear(args[0]), limit, whole, below=below)
            case "min" | "max":
                parts = [self._side(self.algebra.linear(arg), limit, whole, below=below) for arg in args]
                either = (core.op == "min") == below
                return self.sets.union(*parts) if either else self.sets.intersect(*parts)
            case "where":
                return self._select(core, lambda arg: self._side(self.algebra.linear(arg), limit, whole, below=below))
            case "cast" if args[0].dtype == torch.bool:
                return self._inverted_flag(args[0], limit, whole, below=below)
            case "cast" if is_integer(args[0]) and not self.algebra.ranges.may_wrap(core):
                return self._inverted(args[0], limit, whole, below=below)
        return unknown(whole, _why_unsolved(core, self.axis))

    def _side(self, value: Linear, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """value < limit, else value >= limit."""
        return self._negative(value - limit if below else (limit - value).plus(-1), whole)

    def _inverted_division(self, core: Node, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """value // divisor < limit is value < limit * divisor, for a positive divisor and rounding down."""
        value, divisor = core.args
        positive = self.axis not in divisor.axes and self.algebra.ranges.of(divisor).positive
        if core.op == "shr":
            shift = self.algebra.linear(divisor)
            positive = shift.is_constant and 0 <= shift.constant < 62
            divisor = number(1 << shift.constant) if positive else divisor
        rounds_down = core.op != "truncdiv" or self.algebra.ranges.of(value).non_negative
        product = self.algebra.product(limit, divisor) if positive and rounds_down else None
        if product is None:
            return unknown(whole, f"its {core.op} has a divisor or dividend of unknown sign")
        return self._side(self.algebra.linear(value), product, whole, below=below)

    def _inverted_product(self, core: Node, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """value * factor < limit, for a factor that is free of the index and positive: divide by it, rounding up."""
        factor, value = core.args if self.axis not in core.args[0].axes else reversed(core.args)
        if self.axis in factor.axes or not self.algebra.ranges.of(factor).positive:
            return unknown(whole, "it multiplies the index by something of unknown sign")
        end = self._end(limit.scaled(-1))
        if end is None or self.algebra.ranges.may_wrap(core):
            return unknown(whole, _TOO_LARGE)
        quotient = self.algebra.floor_quotient(end, factor)
        return self._side(self.algebra.linear(value), quotient.scaled(-1), whole, below=below)

    def _inverted_abs(self, value: Linear, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """|x| < limit is x < limit and -x < limit; |x| >= limit is the opposite."""
        parts = [self._side(side, limit, whole, below=below) for side in (value, value.scaled(-1))]
        return self.sets.intersect(*parts) if below else self.sets.union(*parts)

    def _inverted_flag(self, flag: Node, limit: Linear, whole: Node, *, below: bool) -> RowSet:
        """A bool as 0 or 1."""
        low, high = (self._side(Linear(constant=value), limit, whole, below=below) for value in (0, 1))
        return self.sets.union(
            self.sets.intersect(self.condition(flag, False), low), self.sets.intersect(self.condition(flag, True), high)
        )

    def _end(self, limit: Linear) -> Node | None:
        """The limit as a node that does not wrap: a value of which nothing is known is clamped first."""
        found, held = self.algebra.range_of(limit), dtype_range(torch.int64)
        if held.contains(found):
            return self.algebra.build(limit)
        wide = [(atom, c) for atom, c in limit if not self.algebra.ranges.of(atom).is_finite]
        if len(wide) != 1 or abs(wide[0][1]) != 1:
            return self.algebra.build(limit) if wide else None
        return self._clamped_end(limit, *wide[0])

    def _clamped_end(self, limit: Linear, atom: Node, coefficient: int) -> Node | None:
        """Clamp one wide atom where the sum could wrap; a clamped end still lies outside of the axis."""
        rest = self.algebra.range_of(limit.without(atom))
        if rest.lo is None or rest.hi is None or rest.lo < -_FAR // 2 or rest.hi > _FAR // 2:
            return None
        over, under = rest.hi > min(coefficient, 0), rest.lo < min(coefficient, 0)
        clamped = atom
        if over if coefficient > 0 else under:
            clamped = self.algebra.minimum(clamped, number(_FAR))
        if under if coefficient > 0 else over:
            clamped = self.algebra.maximum(clamped, number(-_FAR))
        return self.algebra.build(limit.replaced(atom, Linear.of([(clamped, 1)])))


_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
_TOO_LARGE = "its values may exceed 64 bits"


def _first_not_below(value: float, dtype: torch.dtype, *, strict: bool) -> int | None:
    """Return the least integer that rounds in the floating dtype to at least (strict: above) the value."""

    def reached(integer: int) -> bool:
        rounded = float(torch.tensor(integer, dtype=torch.int64, device="cpu").to(dtype))
        return rounded > value if strict else rounded >= value

    low, high = -_FAR, _FAR
    if not math.isfinite(value) or reached(low) or not reached(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _why_unsolved(node: Node, axis: Axis) -> str:
    """Name the operation that has no inverse along the axis."""
    index = _LENGTHS[axis][0]
    match node.op:
        case "load":
            return f"it loads {node.attr} at an index that depends on {index}"
        case "mod" | "fmod":
            return f"a remainder of {index} repeats, so its live keys are no interval"
        case "mul":
            return f"it multiplies {index} by itself"
    return f"{node.op} of {index} has no interval rule"
