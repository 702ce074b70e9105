"""Unions of few half-open intervals whose ends are expressions: what a row of a mask lets through, from both sides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flexgen.ir.graph import Node, topological
from flexgen.lowering.symbols import FALSE, TRUE, ZERO, Algebra, conjuncts, is_small, negation

MAX_SEGMENTS = 4
MAX_END_SIZE = 60
MAX_GUARD_SIZE = 120


@dataclass(frozen=True, slots=True)
class Interval:
    """The indices in [lo, hi) where the guard holds, none elsewhere; an end that is None is the axis's own end."""

    lo: Node | None = None
    hi: Node | None = None
    guard: Node = TRUE

    @property
    def is_everything(self) -> bool:
        return self.lo is None and self.hi is None and self.guard is TRUE


@dataclass(frozen=True, slots=True)
class RowSegment:
    """A part of the live set: it lies inside `outer`, and all of `inner` (a subset of `outer`) is live."""

    outer: Interval
    inner: Interval | None

    @property
    def is_exact(self) -> bool:
        return self.outer == self.inner


@dataclass(frozen=True, slots=True)
class Unsolved:
    """A part of the mask that was not solved for the axis, and why."""

    node: Node
    why: str


@dataclass(frozen=True, slots=True)
class RowSet:
    """The live indices of one row: inside the union of the outers, and all of the inners' union.

    Attributes:
        segments: in ascending order of their lower ends where that is proven.
        unsolved: what kept the set from being exact.
    """

    segments: tuple[RowSegment, ...]
    unsolved: tuple[Unsolved, ...] = ()

    @property
    def is_exact(self) -> bool:
        return all(segment.is_exact for segment in self.segments)

    @property
    def is_everything(self) -> bool:
        return any(s.inner is not None and s.inner.is_everything for s in self.segments)

    @property
    def is_nothing(self) -> bool:
        return not self.segments

    @property
    def is_unbounded(self) -> bool:
        """Whether nothing is known of what must be visited."""
        return any(segment.outer.is_everything for segment in self.segments)


EVERYTHING = RowSet((RowSegment(Interval(), Interval()),))
NOTHING = RowSet(())


def unknown(node: Node, why: str) -> RowSet:
    return RowSet((RowSegment(Interval(), None),), (Unsolved(node, why),))


class IntervalAlgebra:
    """Unions and intersections of row sets along one axis.

    Args:
        algebra: builds the ends.
        index: the input that is solved for; its range bounds the axis.
        length: the input that is the axis's length.
    """

    def __init__(self, algebra: Algebra, index: Node, length: Node) -> None:
        self.algebra = algebra
        self.index = index
        self.length = length

    def guarded(self, condition: Node) -> RowSet:
        """All indices, in the rows where the condition holds."""
        return self._exact(Interval(guard=condition))

    def interval(self, lo: Node | None, hi: Node | None) -> RowSet:
        return self._exact(Interval(lo, hi))

    def _exact(self, interval: Interval) -> RowSet:
        found = self._clean(interval)
        return RowSet((RowSegment(found, found),)) if found else NOTHING

    def _clean(self, interval: Interval) -> Interval | None:
        """Drop ends that lie outside of the axis; None when the interval is provably empty."""
        algebra, reach = self.algebra, self.algebra.ranges.of(self.index)
        lo, hi = self._given(interval.guard, interval.lo), self._given(interval.guard, interval.hi)
        below = algebra.ranges.of(lo) if lo else None
        above = algebra.ranges.of(hi) if hi else None
        if below and reach.hi is not None and below.lo is not None and below.lo > reach.hi:
            return None
        if interval.guard is FALSE or (above and above.hi is not None and above.hi <= 0):
            return None
        if lo and hi and algebra.proves_le(hi, lo):
            return None
        if below and below.hi is not None and below.hi <= 0:
            lo = None
        if hi is self.length or (above and reach.hi is not None and above.lo is not None and above.lo > reach.hi):
            hi = None
        return Interval(lo, hi, interval.guard)

    def _given(self, guard: Node, end: Node | None) -> Node | None:
        """Decide choices inside of an end by the guard, outside of which the end has no meaning."""
        if end is None or guard is TRUE:
            return end
        known = dict.fromkeys(conjuncts(guard), TRUE) | {negation(part): FALSE for part in conjuncts(guard)}
        return self.algebra.rebuild(end, known) if any(part in known for part in topological(end)) else end

    def intersect(self, first: RowSet, second: RowSet) -> RowSet:
        pairs = [self._meet(a, b) for a in first.segments for b in second.segments]
        unsolved = dict.fromkeys(first.unsolved + second.unsolved)
        return self._normal([pair for pair in pairs if pair], unsolved)

    def _meet(self, a: RowSegment, b: RowSegment) -> RowSegment | None:
        outer = self._meet_intervals(a.outer, b.outer)
        if outer is None:
            return None
        if a.is_exact and b.is_exact:
            return RowSegment(outer, outer)
        return RowSegment(outer, self._meet_intervals(a.inner, b.inner) if a.inner and b.inner else None)

    def _meet_intervals(self, a: Interval, b: Interval) -> Interval | None:
        los = [end for end in (a.lo, b.lo) if end]
        his = [end for end in (a.hi, b.hi) if end]
        return self._clean(
            Interval(
                self.algebra.maximum(*los) if los else None,
                self.algebra.minimum(*his) if his else None,
                self.algebra.conjunction(a.guard, b.guard),
            )
        )

    def union(self, first: RowSet, second: RowSet) -> RowSet:
        return self._normal([*first.segments, *second.segments], dict.fromkeys(first.unsolved + second.unsolved))

    def _normal(self, segments: list[RowSegment], unsolved: Iterable[Unsolved]) -> RowSet:
        segments = self._joined([self._capped(segment) for segment in segments])
        everything = next((s for s in segments if s.outer.is_everything), None)
        if everything:
            segments = [replace(everything, inner=self._best_inner(everything, segments))]
        segments = self._ordered(segments)
        while len(segments) > MAX_SEGMENTS:
            segments[-2:] = [self._capped(self._hull(segments[-2], segments[-1]))]
        exact = all(s.is_exact for s in segments)
        return RowSet(tuple(segments), () if exact else tuple(unsolved))

    @staticmethod
    def _best_inner(everything: RowSegment, segments: list[RowSegment]) -> Interval | None:
        """One interval that is live for certain: its own, else an unconditional one, else any."""
        inners = [s.inner for s in (everything, *segments) if s.inner]
        return everything.inner or next((i for i in inners if i.guard is TRUE), inners[0] if inners else None)

    def _joined(self, segments: list[RowSegment]) -> list[RowSegment]:
        """Join segments whose union is one segment, until no pair is left."""
        kept: list[RowSegment] = []
        for segment in segments:
            joined = True
            while joined:
                joined = False
                for other in kept:
                    both = self._join(other, segment)
                    if both:
                        kept.remove(other)
                        segment, joined = both, True
                        break
            kept.append(segment)
        return kept

    def _join(self, a: RowSegment, b: RowSegment) -> RowSegment | None:
        """The union as one segment, where that loses nothing."""
        if a == b or (a.outer.is_everything and a.is_exact):
            return a
        if b.outer.is_everything and b.is_exact:
            return b
        if not (a.is_exact and b.is_exact):
            return None
        joined = self._join_intervals(a.outer, b.outer)
        return RowSegment(joined, joined) if joined else None

    def _join_intervals(self, a: Interval, b: Interval) -> Interval | None:
        if (a.lo, a.hi) == (b.lo, b.hi):
            return Interval(a.lo, a.hi, self.algebra.disjunction(a.guard, b.guard))
        if a.lo is None and b.lo is None:
            return Interval(None, self._later_end(a, b))
        if a.hi is None and b.hi is None:
            return Interval(self._earlier_start(a, b), None)
        if a.guard is b.guard and self._touch(a, b) and self._touch(b, a):
            return self._span(a, b)
        return None

    def _touch(self, a: Interval, b: Interval) -> bool:
        return a.lo is None or b.hi is None or self.algebra.proves_le(a.lo, b.hi)

    def _later_end(self, a: Interval, b: Interval) -> Node:
        """The greater end of two intervals that start at 0; one whose guard fails ends at 0."""
        where, a_hi, b_hi = self.algebra.where, a.hi or self.length, b.hi or self.length
        both = self.length if self.length in (a_hi, b_hi) else self.algebra.maximum(a_hi, b_hi)
        if a.guard is TRUE or b.guard is TRUE:
            return where(a.guard, where(b.guard, both, a_hi), b_hi)
        return self.algebra.maximum(where(a.guard, a_hi, ZERO), where(b.guard, b_hi, ZERO))

    def _earlier_start(self, a: Interval, b: Interval) -> Node:
        """The lesser start of two intervals that end with the axis; one whose guard fails starts there."""
        where, a_lo, b_lo = self.algebra.where, a.lo or ZERO, b.lo or ZERO
        both = ZERO if ZERO in (a_lo, b_lo) else self.algebra.minimum(a_lo, b_lo)
        if a.guard is TRUE or b.guard is TRUE:
            return where(a.guard, where(b.guard, both, a_lo), b_lo)
        return self.algebra.minimum(where(a.guard, a_lo, self.length), where(b.guard, b_lo, self.length))

    def _span(self, a: Interval, b: Interval) -> Interval:
        lo = self.algebra.minimum(a.lo, b.lo) if a.lo and b.lo else None
        hi = self.algebra.maximum(a.hi, b.hi) if a.hi and b.hi else None
        return Interval(lo, hi, self.algebra.disjunction(a.guard, b.guard))

    @staticmethod
    def _capped(segment: RowSegment) -> RowSegment:
        """Give up on ends and conditions that have become too long to be of use."""
        outer = segment.outer
        lo = outer.lo if outer.lo and is_small(outer.lo, MAX_END_SIZE) else None
        hi = outer.hi if outer.hi and is_small(outer.hi, MAX_END_SIZE) else None
        guard = outer.guard if is_small(outer.guard, MAX_GUARD_SIZE) else TRUE
        capped = Interval(lo, hi, guard)
        return segment if capped == outer else RowSegment(capped, None)

    def _hull(self, a: RowSegment, b: RowSegment) -> RowSegment:
        return RowSegment(self._span(a.outer, b.outer), a.inner or b.inner)

    def _ordered(self, segments: list[RowSegment]) -> list[RowSegment]:
        """Stable insertion sort by lower end, moving a segment only where the order is proven."""
        ordered: list[RowSegment] = []
        for segment in segments:
            place = next((i for i, other in enumerate(ordered) if self._starts_before(segment, other)), len(ordered))
            ordered.insert(place, segment)
        return ordered

    def _starts_before(self, a: RowSegment, b: RowSegment) -> bool:
        if a.outer.lo is None or b.outer.lo is None:
            return a.outer.lo is None and b.outer.lo is not None
        return self.algebra.proves_lt(a.outer.lo, b.outer.lo)
