"""Prints a schedule's key ranges as scalar statements: tile numbers [lo, hi) and [full_lo, full_hi)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg
from flexgen.ir.graph import Node
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PrintedRanges:
    """Statements that define `lo`, `hi` (and `full_lo`, `full_hi`) of each segment, and what they need.

    Attributes:
        lines: statements, in order.
        names: per segment, (lo, hi, full_lo, full_hi); the full ones equal where nothing is known.
        args, prelude: as in PrintedMod.
    """

    lines: tuple[str, ...]
    names: tuple[SegmentNames, ...]
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SegmentNames:
    """Names of a segment's tile numbers; `full_*` is None where no tile is known to be full."""

    lo: str
    hi: str
    full_lo: str | None
    full_hi: str | None
    left_edge: bool  # tiles in [lo, full_lo) may exist


@dataclass(frozen=True, slots=True)
class WalkedAxis:
    """The axis a loop walks, by the names its kernel uses.

    Attributes:
        length, block: number of positions, and of those in a tile.
        offset: the logical index of the first position ("KV_OFFSET"), or "" for 0.
        exists: which of the tile's own rows exist, or "" where all do; per-row bounds leave the others out.
    """

    length: str
    block: str
    offset: str
    exists: str


@dataclass(frozen=True, slots=True)
class _PrintedBound:
    """One end of a range as text, and whether it is within the axis already."""

    text: str
    node: Node
    is_clamped: bool


class RangesPrinter:
    """Prints one schedule.

    Args:
        context: as for mods.
        inputs: the text of each input name inside the kernel.
        axis: what is walked.
    """

    def __init__(self, context: PrintContext, inputs: Mapping[str, str], axis: WalkedAxis) -> None:
        taken = {*inputs.values(), *context.buffers, *context.scalars}
        self._printer = NodePrinter(context, inputs, lambda node: None, taken)
        self._context = context
        self._axis = axis
        self._lines: list[str] = []
        self._full = True

    def print(self, schedule: Schedule, *, full: bool) -> PrintedRanges:
        """Print the segments' ranges.

        Args:
            full: the kernel tells tiles that need a check from those that do not.
        """
        self._full = full
        many = len(schedule.segments) > 1
        names = tuple(
            self._segment(segment, f"_{number}" if many else "") for number, segment in enumerate(schedule.segments)
        )
        if many:
            self._make_disjoint(names, schedule.sorted)
        return PrintedRanges(
            tuple(self._lines), names, tuple(self._printer.args.values()), tuple(self._printer.prelude)
        )

    def _segment(self, segment: SegmentBounds, suffix: str) -> SegmentNames:
        lo, hi = f"lo{suffix}", f"hi{suffix}"
        self._lines.extend(f"# {line}" for line in segment.because.splitlines())
        self._assign(lo, self._tile(self._physical(segment.visit_lo), round_up=False))
        self._assign(hi, self._tile(self._physical(segment.visit_hi), round_up=True))
        full_lo, full_hi = f"full_lo{suffix}", f"full_hi{suffix}"
        if not self._full or segment.full_lo is None or segment.full_hi is None:
            return self._without_full(SegmentNames(lo, hi, full_lo, full_hi, True), alone=not suffix)
        left_edge = bool(suffix) or segment.full_lo != segment.visit_lo or not _is_zero(segment.visit_lo)
        if left_edge:
            self._assign(full_lo, self._tile(self._physical(segment.full_lo), round_up=True))
        self._assign(full_hi, self._tile(self._physical(segment.full_hi), round_up=False))
        if not suffix:
            self._clamp_full(SegmentNames(lo, hi, full_lo, full_hi, left_edge))
        return SegmentNames(lo, hi, full_lo if left_edge else lo, full_hi, left_edge)

    def _without_full(self, names: SegmentNames, *, alone: bool) -> SegmentNames:
        """Leave the full range away, or make it empty where other segments have one."""
        if alone or not self._full:
            return SegmentNames(names.lo, names.hi, None, None, True)
        self._assign(str(names.full_lo), names.lo)
        self._assign(str(names.full_hi), names.lo)
        return names

    def _clamp_full(self, names: SegmentNames) -> None:
        """Keep lo <= full_lo <= full_hi <= hi (with hi at least lo)."""
        if names.full_hi is None:
            return
        if names.left_edge:
            self._assign(f"{names.full_lo}", f"tl.minimum(tl.maximum({names.full_lo}, {names.lo}), {names.hi})")
            self._assign(names.full_hi, f"tl.minimum(tl.maximum({names.full_hi}, {names.full_lo}), {names.hi})")
        else:
            self._assign(names.full_hi, f"tl.minimum(tl.maximum({names.full_hi}, {names.lo}), {names.hi})")

    def _make_disjoint(self, names: tuple[SegmentNames, ...], is_sorted: bool) -> None:
        if not is_sorted:
            self._sort(names)
        self._lines.append("# Visit each tile once: a segment starts where the ones before it have ended.")
        for number, name in enumerate(names):
            if number:
                previous = names[number - 1].hi
                self._assign(name.lo, f"tl.maximum({name.lo}, {previous})")
            self._assign(name.hi, f"tl.maximum({name.hi}, {name.lo})")
            self._clamp_full(name)

    def _sort(self, names: tuple[SegmentNames, ...]) -> None:
        self._lines.append("# Order the segments by where they start; which comes first depends on run-time values.")
        for end in range(len(names) - 1, 0, -1):
            for left, right in itertools.pairwise(names[: end + 1]):
                self._assign("swap", f"{right.lo} < {left.lo}")
                for a, b in zip(_fields(left), _fields(right), strict=True):
                    self._lines.append(f"{a}, {b} = tl.where(swap, {b}, {a}), tl.where(swap, {a}, {b})")

    def _assign(self, name: str, text: str) -> None:
        self._lines.append(f"{name} = {text}")

    def _physical(self, bound: Bound) -> _PrintedBound:
        """Print a bound as a scalar in physical positions."""
        printer = self._printer
        before = len(printer.assignments)
        text = printer.print(bound.node).text
        self._lines.extend(f"{a.name} = {a.text}" for a in printer.assignments[before:])
        if bound.reduce is not None:
            if self._axis.exists:
                neutral = self._axis.length if bound.reduce == "min" else "0"
                text = f"tl.where({self._axis.exists}, {text}, {neutral})"
            text = f"tl.{bound.reduce}({text}, 0)"
        if self._axis.offset:
            text = f"({text}) - {self._axis.offset}"
        if printer.computed_dtype(bound.node) == torch.int64:
            clamped = f"tl.minimum(tl.maximum({text}, 0), {self._axis.length}).to(tl.int32)"
            return _PrintedBound(clamped, bound.node, is_clamped=True)
        return _PrintedBound(text, bound.node, is_clamped=False)

    def _tile(self, printed: _PrintedBound, *, round_up: bool) -> str:
        node = printed.node
        if node.op == "const" and node.attr == 0 and not self._axis.offset:
            return "0"
        clamped = printed.text if printed.is_clamped else self._clamp(printed.text, node)
        block = self._axis.block
        return f"tl.cdiv({clamped}, {block})" if round_up else f"{_grouped(clamped)} // {block}"

    def _clamp(self, text: str, node: Node) -> str:
        if not self._context.analysis.of(node).non_negative or self._axis.offset:
            text = f"tl.maximum({text}, 0)"
        if text != self._axis.length:
            text = f"tl.minimum({text}, {self._axis.length})"
        return text


def _grouped(text: str) -> str:
    return text if (text.endswith(")") and text.startswith("tl.")) or text.isidentifier() else f"({text})"


def _is_zero(bound: Bound) -> bool:
    return bound.reduce is None and bound.node.op == "const" and bound.node.attr == 0


def _fields(names: SegmentNames) -> tuple[str, ...]:
    return tuple(name for name in (names.lo, names.hi, names.full_lo, names.full_hi) if name is not None)
