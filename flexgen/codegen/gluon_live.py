"""Prints what a row sees of the other side, where it is one interval: statements over a tile's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.codegen.dialects.gluon import translate
from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg
from flexgen.ir.graph import Axis, Node
from flexgen.lowering.intervals import Interval
from flexgen.lowering.symbols import TRUE


@dataclass(frozen=True, slots=True)
class PrintedLive:
    """Statements that define `kv_lo` and `kv_hi` (`q_lo` and `q_hi`), and how a tile of scores compares with them.

    Attributes:
        lines: statements over the rows' index, one value for each row of a warpgroup; both ends lie in int32.
        distance, width: a position's distance from the interval's start, and the interval's width, as tiles of scores.
        args, prelude: as in PrintedMod.
    """

    lines: tuple[str, ...]
    distance: str
    width: str
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


def print_live(interval: Interval, context: PrintContext, walked: Axis = Axis.KV) -> PrintedLive:
    """Print an interval [lo, hi) of the walked side, which the guard may empty and the side's length cuts off.

    Rows are queries whose keys are walked, or keys whose queries are.
    """
    side, row, length = ("kv", "q_idx", "KV_LEN") if walked is Axis.KV else ("q", "kv_idx", "Q_LEN")
    own = Axis.Q if walked is Axis.KV else Axis.KV
    inputs = {name: name for name in ("b", "h", row, "Q_LEN", "KV_LEN")}
    printer = NodePrinter(context, inputs, lambda node: None, {*inputs, f"{side}_lo", f"{side}_hi"})
    lo = _end(printer, interval.lo, "tl.maximum({}, 0)", length) if interval.lo else "0"
    hi = _end(printer, interval.hi, f"tl.minimum({{}}, {length})", length) if interval.hi else length
    if interval.guard is not TRUE:
        hi = f"tl.where({printer.print(interval.guard).text}, {hi}, 0)"
    ends = (interval.lo, interval.hi, interval.guard)
    lo_varies, any_varies = (any(end is not None and own in end.axes for end in some) for some in (ends[:1], ends))
    lines = [f"{a.name} = {a.text}" for a in printer.assignments]
    lines += [f"{side}_lo = {lo}", f"{side}_hi = {hi}"]
    start = "" if interval.lo is None else f" - {side}_lo[:, None]" if lo_varies else f" - {side}_lo"
    return PrintedLive(
        lines=tuple(translate(line) for line in lines),
        distance=f"{side}_idx[None, :]{start}",
        width=f"{side}_width[:, None]" if any_varies else f"{side}_width",
        args=tuple(printer.args.values()),
        prelude=tuple(printer.prelude),
    )


def _end(printer: NodePrinter, node: Node, clamped: str, length: str) -> str:
    text = printer.print(node).text
    if printer.computed_dtype(node) == torch.int64:
        return f"tl.minimum(tl.maximum({text}, 0), {length}).to(tl.int32)"
    if clamped.startswith("tl.maximum") and printer.context.analysis.of(node).non_negative:
        return text
    return clamped.format(text)
