"""Prints a row's interval of live keys as statements over a tile's queries."""

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
    """Statements that define `kv_lo` and `kv_hi`, and how a tile of scores compares with them.

    Attributes:
        lines: statements over `q_idx`, one value for each query of a warpgroup; both ends lie in int32.
        distance, width: a key's distance from the interval's start, and the interval's width, as tiles of scores.
        args, prelude: as in PrintedMod.
    """

    lines: tuple[str, ...]
    distance: str
    width: str
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


def print_live(interval: Interval, context: PrintContext) -> PrintedLive:
    """Print an interval [lo, hi) in kv_idx, which the guard may empty and KV_LEN cuts off."""
    inputs = {name: name for name in ("b", "h", "q_idx", "Q_LEN", "KV_LEN")}
    printer = NodePrinter(context, inputs, lambda node: None, {*inputs, "kv_lo", "kv_hi"})
    lo = _end(printer, interval.lo, "tl.maximum({}, 0)") if interval.lo else "0"
    hi = _end(printer, interval.hi, "tl.minimum({}, KV_LEN)") if interval.hi else "KV_LEN"
    if interval.guard is not TRUE:
        hi = f"tl.where({printer.print(interval.guard).text}, {hi}, 0)"
    ends = (interval.lo, interval.hi, interval.guard)
    lo_varies, any_varies = (any(end is not None and Axis.Q in end.axes for end in some) for some in (ends[:1], ends))
    lines = [f"{a.name} = {a.text}" for a in printer.assignments]
    lines += [f"kv_lo = {lo}", f"kv_hi = {hi}"]
    start = "" if interval.lo is None else " - kv_lo[:, None]" if lo_varies else " - kv_lo"
    return PrintedLive(
        lines=tuple(translate(line) for line in lines),
        distance=f"kv_idx[None, :]{start}",
        width="kv_width[:, None]" if any_varies else "kv_width",
        args=tuple(printer.args.values()),
        prelude=tuple(printer.prelude),
    )


def _end(printer: NodePrinter, node: Node, clamped: str) -> str:
    text = printer.print(node).text
    if printer.computed_dtype(node) == torch.int64:
        return f"tl.minimum(tl.maximum({text}, 0), KV_LEN).to(tl.int32)"
    if clamped.startswith("tl.maximum") and printer.context.analysis.of(node).non_negative:
        return text
    return clamped.format(text)
