"""Prints a mod once, as a device function of broadcastable index tensors that every kernel calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flexgen.codegen.dialects.triton import type_name
from flexgen.codegen.expression import Expression, call, method
from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg
from flexgen.codegen.wrap import wrap_line
from flexgen.errors import SourceSpan
from flexgen.ir.graph import Axis, Graph, Node
from flexgen.ir.origins import Origins

MOD_INPUTS: Mapping[str, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask": ("b", "h", "q_idx", "kv_idx"),
}


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """One line of a printed function and the user's line it computes, if known."""

    text: str
    span: SourceSpan | None = None


@dataclass(frozen=True, slots=True)
class PrintedMod:
    """A printed device function.

    Attributes:
        name: the function's name.
        lines: the function's text, at column 0.
        args: captured values it takes after the indices, in order.
        prelude: names of prelude functions it calls.
        libdevice: whether it calls libdevice.
    """

    name: str
    lines: tuple[PrintedLine, ...]
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]
    libdevice: bool

    def call(self, **inputs: str) -> str:
        """Return a call's text with the given texts for the indices (and the score)."""
        return f"{self.name}({', '.join([*inputs.values(), *(arg.name for arg in self.args)])})"


def print_mod(graph: Graph, origins: Origins, context: PrintContext, score_dtype: torch.dtype) -> PrintedMod:
    """Print a mod's graph.

    A score_mod returns a tile of `score_dtype`; a mask_mod a bool tensor that broadcasts to the tile.
    """
    doc = f"{graph.name}: the {graph.kind} of one (query, key) pair; indices broadcast to the tile."
    tile_dtype = score_dtype if graph.kind == "score" else None
    return print_function(f"{graph.kind}_mod", doc, MOD_INPUTS[graph.kind], graph.root, origins, context, tile_dtype)


def print_function(
    name: str,
    doc: str,
    inputs: tuple[str, ...],
    root: Node,
    origins: Origins,
    context: PrintContext,
    tile_dtype: torch.dtype | None,
) -> PrintedMod:
    """Print an expression as a device function of its inputs; with `tile_dtype` it returns a full tile of it."""
    printer = NodePrinter(context, {n: n for n in inputs}, origins.variable, reserved_names(inputs, context))
    result = printer.print(root)
    if tile_dtype is not None:
        result = as_tile(root, result, printer.computed_dtype(root), tile_dtype)
    args = tuple(printer.args.values())
    head = f"def {name}({', '.join([*inputs, *(arg.name for arg in args)])}):"
    lines = [PrintedLine("@triton.jit"), PrintedLine(head), PrintedLine(f'    """{doc}"""')]
    lines += body_lines(printer, origins, root, result)
    return PrintedMod(name, tuple(wrapped_lines(lines)), args, tuple(printer.prelude), printer.libdevice)


def wrapped_lines(lines: list[PrintedLine]) -> Iterator[PrintedLine]:
    """Yield the lines, long ones broken, each piece with its line's origin."""
    for line in lines:
        yield from (PrintedLine(piece, line.span) for piece in wrap_line(line.text))


RESERVED = frozenset({"tl", "triton", "libdevice", "float"})


def reserved_names(inputs: tuple[str, ...], context: PrintContext) -> set[str]:
    """Return the names that assignments of a device function must avoid."""
    captured = {*context.buffers, *context.scalars}
    helpers = {"floor_div", "floor_mod", "float_floor_div", "float_floor_mod", "sign", "truncate", "round_half_even"}
    return {*inputs, *captured, *RESERVED, *helpers, "tanh", "tanh_approx", "expm1", "log1p", "power"}


def as_tile(root: Node, result: Expression, dtype: torch.dtype, score_dtype: torch.dtype) -> Expression:
    """Make a score_mod's result a full tile: it may be a constant, or depend on some of the indices only."""
    if root.op == "const":
        return call("tl.full", "score.shape", result, type_name(score_dtype))
    if dtype != score_dtype:
        result = method(result, f"to({type_name(score_dtype)})")
    if not {Axis.Q, Axis.KV} <= root.axes or not _input_names(root) & {"score", "grad"}:
        return call("tl.broadcast_to", result, "score.shape")
    return result


def _input_names(root: Node) -> set[str]:
    seen, stack, names = {root}, [root], set()
    while stack:
        node = stack.pop()
        if node.op == "input":
            names.add(str(node.attr))
        fresh = [arg for arg in node.args if arg not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return names


def body_lines(printer: NodePrinter, origins: Origins, root: Node, result: Expression) -> list[PrintedLine]:
    """Return a function's body: its assignments and what it returns, under the user's lines."""
    lines: list[PrintedLine] = []
    shown: str | None = None
    statements = [(f"{a.name} = {a.text}", a.node) for a in printer.assignments]
    for text, node in [*statements, (f"return {result.text}", root)]:
        span = origins.span(node)
        comment = comment_text(span) if span else None
        if comment and comment != shown:
            lines.append(PrintedLine(f"    # {comment}", span))
            shown = comment
        lines.append(PrintedLine(f"    {text}", span))
    return lines


def comment_text(span: SourceSpan) -> str:
    """Return the user's line as text that cannot leave a comment: one line, printable ASCII."""
    line = " ".join(span.text.split())
    safe = "".join(ch if " " <= ch <= "~" else "?" for ch in line)
    return safe if len(safe) <= 100 else safe[:97] + "..."
