"""What is proven about a mask: its tier, the ranges a tile visits in both directions, and the safety of its rows."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from flexgen.ir.graph import Axis, Graph, Node, topological
from flexgen.ir.origins import Origins
from flexgen.lowering.bounds import Bound, Box, SegmentBounds, TileBounds
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.intervals import EVERYTHING, MAX_SEGMENTS, NOTHING, Interval, RowSet
from flexgen.lowering.proofs import Proof, prove_contiguous, prove_rows_safe
from flexgen.lowering.ranges import Range, RangeAnalysis
from flexgen.lowering.solve import solve
from flexgen.lowering.symbols import FALSE, KV_LEN, TRUE, ZERO, Algebra


class Tier(enum.Enum):
    """How a kernel can find the live tiles of a mask."""

    NO_MASK = "no mask"
    ALL_TRUE = "all true"
    ALL_FALSE = "all false"
    CLOSED_FORM = "closed form"  # bounds are scalar expressions over a tile's corners
    ROW_REDUCED = "row reduced"  # bounds are computed per row of the tile and reduced
    BLOCK_TABLE = "block table"  # not a union of intervals, but blocks can be classified
    DENSE = "dense loop"  # nothing is known: every tile is visited and checked


# A run-time integer outside of this range is outside of what the bounds were derived for.
SCALAR_RANGE = Range(-(2**48), 2**48)


@dataclass(frozen=True, slots=True)
class Direction:
    """What is known along one direction: keys of a tile of queries, or queries of a tile of keys.

    Attributes:
        tier: see `Tier`.
        because: the reason, for people.
        segments: what a tile visits; empty when nothing is live.
        sorted: the segments' `visit_lo` are known to ascend.
        rows: the live set of one row, from which the segments are derived.
    """

    tier: Tier
    because: str
    segments: tuple[SegmentBounds, ...]
    sorted: bool
    rows: RowSet


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """What is known about a mask.

    Attributes:
        kv: keys visited by a tile of queries (forward, dQ).
        q: queries visited by a tile of keys (dK, dV).
        rows_safe: whether every query in [0, Q_LEN) has a live key.
        contiguous: whether the live keys of every query are one interval.
        scalar_ranges: for each run-time integer that the bounds use, the range outside of which they do not hold;
            the launch checks it.
        trusted_buffers: int64 buffers whose elements the bounds add to indices: they are taken to stay below 2**60
            in magnitude, so that the sum does not wrap.
    """

    kv: Direction
    q: Direction
    rows_safe: Proof
    contiguous: Proof
    scalar_ranges: Mapping[str, Range] = field(default_factory=lambda: MappingProxyType({}))
    trusted_buffers: tuple[str, ...] = ()

    @property
    def tier(self) -> Tier:
        return self.kv.tier

    @property
    def because(self) -> str:
        return self.kv.because

    @property
    def kv_segments(self) -> tuple[SegmentBounds, ...]:
        return self.kv.segments

    @property
    def q_segments(self) -> tuple[SegmentBounds, ...]:
        return self.q.segments

    def describe(self) -> str:
        """Return the facts as text, one line each."""
        lines = [f"keys of a query    {self.kv.tier.value}: {self.kv.because}"]
        lines.append(f"queries of a key   {self.q.tier.value}: {self.q.because}")
        for name, proof in (("rows safe", self.rows_safe), ("contiguous", self.contiguous)):
            lines.append(f"{name:<18} {'yes' if proof.holds else 'not proven'}: {proof.because}")
        return "\n".join(lines)


def analyse_mask(
    graph: Graph | None,
    *,
    assume: Mapping[str | Node, Range] | None = None,
    origins: Origins | None = None,
    single_head: bool = False,
) -> MaskFacts:
    """Analyse a mask.

    Args:
        graph: the captured mask; None for no mask.
        assume: ranges of inputs, scalars and buffers' elements that the caller guarantees.
        origins: the user's names, for the reasons.
        single_head: a tile has one head, so bounds use `h` instead of the corners `h_lo` and `h_hi`.
    """
    if graph is None:
        return _without_mask()
    scalars = _scalar_ranges(graph)
    assumed: dict[str | Node, Range] = dict(scalars.items())
    assumed.update(assume or {})
    algebra = Algebra(RangeAnalysis(assumed))
    mask = algebra.rebuild(graph.root)
    kv, q = (_direction(mask, axis, algebra, origins, single_head) for axis in (Axis.KV, Axis.Q))
    used = list(topological(*(bound.node for way in (kv, q) for segment in way.segments for bound in segment.bounds)))
    return MaskFacts(
        kv,
        q,
        prove_rows_safe(mask, kv.rows, algebra),
        prove_contiguous(kv.rows),
        MappingProxyType({n: r for n, r in scalars.items() if any(node.attr == n for node in used)}),
        _trusted_buffers(used, algebra),
    )


def _without_mask() -> MaskFacts:
    algebra = Algebra()
    kv, q = (_bounded(Tier.NO_MASK, "there is no mask", EVERYTHING, axis, algebra) for axis in (Axis.KV, Axis.Q))
    has_keys = algebra.lt(ZERO, KV_LEN)
    return MaskFacts(kv, q, Proof(True, "there is no mask", (has_keys,)), Proof(True, "there is no mask"))


def _scalar_ranges(graph: Graph) -> dict[str, Range]:
    """Run-time integers, as which the bounds trust only sane values; sizes have a range of their own."""
    names = (str(n.attr) for n in graph.nodes() if n.op == "scalar" and n.dtype == torch.int64)
    return {name: SCALAR_RANGE for name in names if ".size(" not in name}


def _trusted_buffers(used: list[Node], algebra: Algebra) -> tuple[str, ...]:
    """Names of int64 buffers of unknown range whose elements take part in sums."""
    sums = [arg for node in used if node.op in ("add", "sub", "neg", "mul") for arg in node.args]
    wide = {str(arg.attr) for arg in sums if arg.op == "load" and not algebra.ranges.of(arg).is_finite}
    return tuple(sorted(wide))


def _direction(mask: Node, axis: Axis, algebra: Algebra, origins: Origins | None, single_head: bool) -> Direction:
    rows = EVERYTHING if mask is TRUE else NOTHING if mask is FALSE else solve(mask, axis, algebra)
    tile = TileBounds(algebra, axis, Box.of_tile(axis, single_head=single_head))
    segments = tuple(tile.segment(segment, interval_text(segment.outer, axis)) for segment in rows.segments)
    tier = _tier(rows, segments, axis)
    return Direction(tier, _reason(tier, rows, axis, origins), segments, _are_sorted(segments, algebra), rows)


def _bounded(tier: Tier, because: str, rows: RowSet, axis: Axis, algebra: Algebra) -> Direction:
    tile = TileBounds(algebra, axis, Box.of_tile(axis))
    return Direction(tier, because, tuple(tile.segment(s, because) for s in rows.segments), True, rows)


def _tier(rows: RowSet, segments: tuple[SegmentBounds, ...], axis: Axis) -> Tier:
    if rows.is_nothing:
        return Tier.ALL_FALSE
    if rows.is_everything:
        return Tier.ALL_TRUE
    if not rows.is_exact:
        hopeless = rows.is_unbounded and all(not _has_block_rule(part.node) for part in rows.unsolved)
        return Tier.DENSE if hopeless and not any(s.inner for s in rows.segments) else Tier.BLOCK_TABLE
    reduced = any(bound.reduce for segment in segments for bound in segment.bounds)
    return Tier.ROW_REDUCED if reduced else Tier.CLOSED_FORM


def _has_block_rule(node: Node) -> bool:
    """Whether blocks of the node can be classified by interval arithmetic over its one-axis parts."""
    both = {Axis.Q, Axis.KV}
    return all(
        part.op not in ("load", "and", "or", "xor", "shl", "shr") or (part.dtype == torch.bool and part.op != "load")
        for part in topological(node)
        if both <= part.axes
    )


def _reason(tier: Tier, rows: RowSet, axis: Axis, origins: Origins | None) -> str:
    index = "kv_idx" if axis is Axis.KV else "q_idx"
    match tier:
        case Tier.ALL_TRUE:
            return "the mask is always true"
        case Tier.ALL_FALSE:
            return "the mask is never true"
        case Tier.CLOSED_FORM | Tier.ROW_REDUCED:
            kind = "an interval" if len(rows.segments) == 1 else f"a union of {len(rows.segments)} intervals"
            return f"mask is {kind} in {index}: {_union_text(rows, axis)}"
    known = "" if rows.is_unbounded else f"; live keys lie in {_union_text(rows, axis)}"
    if not rows.unsolved:
        return f"the mask is a union of more than {MAX_SEGMENTS} intervals in {index}{known}"
    part = rows.unsolved[0]
    return f"{_named(part.node, origins)} is not solved for {index}: {part.why}{known}"


def _named(node: Node, origins: Origins | None) -> str:
    name = origins.variable(node) if origins else None
    text = expression_text(node)
    return f"{name} = ({text})" if name else f"({text})"


def _union_text(rows: RowSet, axis: Axis) -> str:
    return " and ".join(interval_text(segment.outer, axis) for segment in rows.segments)


def interval_text(interval: Interval, axis: Axis) -> str:
    """Return the interval as [lo, hi), with the condition under which it is not empty."""
    end = "KV_LEN" if axis is Axis.KV else "Q_LEN"
    lo = expression_text(interval.lo) if interval.lo else "0"
    hi = expression_text(interval.hi) if interval.hi else end
    condition = "" if interval.guard is TRUE else f" where {expression_text(interval.guard)}"
    return f"[{lo}, {hi}){condition}"


def _are_sorted(segments: tuple[SegmentBounds, ...], algebra: Algebra) -> bool:
    return all(_ascends(first.visit_lo, second.visit_lo, algebra) for first, second in itertools.pairwise(segments))


def _ascends(first: Bound, second: Bound, algebra: Algebra) -> bool:
    """Starts are clamped to the axis, which begins at 0; minima over the same rows keep a pointwise order."""
    if first.reduce is None and algebra.proves_le(first.node, ZERO):
        return True
    if first.reduce != second.reduce and first.reduce is not None:
        return False
    return algebra.proves_le(first.node, second.node)
