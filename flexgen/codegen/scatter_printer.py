"""Prints how a backward kernel accumulates the gradient of a captured buffer: two device functions for each scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.expression import Expression, Precedence, binary
from flexgen.codegen.mod_printer import PrintedLine, PrintedMod, print_function, reserved_names, wrapped_lines
from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg, Role
from flexgen.ir.graph import Axis
from flexgen.ir.score_grad import GRAD_INPUTS, Scatter, ScoreGrad

INDICES = ("b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True, slots=True)
class PrintedScatter:
    """The device functions of one scatter, and how the kernel calls them.

    Attributes:
        lines: both functions, at column 0.
        contribution: the function that computes each pair's value.
        scatter: name of the function that adds values.
        carried: the accumulator the loop carries where the element does not change along the walked axis; "" where
            every tile is added at once.
        scatter_args: what the latter takes after its own arguments.
        prelude, libdevice: as in PrintedMod.
        axes: the axes that the element depends on.
    """

    lines: tuple[PrintedLine, ...]
    contribution: PrintedMod
    scatter: str
    carried: str
    scatter_args: tuple[Arg, ...]
    prelude: tuple[str, ...]
    libdevice: bool
    axes: frozenset[Axis]

    @property
    def args(self) -> tuple[Arg, ...]:
        return tuple(dict.fromkeys((*self.contribution.args, *self.scatter_args)))


@dataclass(frozen=True, slots=True)
class ScatterCalls:
    """The statements of one scatter in a kernel.

    Attributes:
        name, value: the tile of contributions, inside the loop.
        add: what the loop does with it.
        start, flush: before the loop and after it; "" where every tile is added at once.
    """

    name: str
    value: str
    add: str
    start: str
    flush: str


def print_scatters(
    grad: ScoreGrad, wanted: Sequence[Scatter], walked: Axis, context: PrintContext, dtype: torch.dtype
) -> tuple[PrintedScatter, ...]:
    """Print the scatters that one kernel accumulates.

    Args:
        grad: the gradients they belong to.
        wanted: those of this kernel.
        walked: the axis that the kernel's loop walks.
        dtype: of the accumulated gradients.
    """
    return tuple(_print(grad, scatter, number, walked, context, dtype) for number, scatter in enumerate(wanted))


def _print(
    grad: ScoreGrad, scatter: Scatter, number: int, walked: Axis, context: PrintContext, dtype: torch.dtype
) -> PrintedScatter:
    suffix = f"{scatter.buffer}_{number}" if number else scatter.buffer
    doc = f"What each (query, key) pair adds to the gradient of {scatter.buffer}."
    value = print_function(f"contribution_{suffix}", doc, GRAD_INPUTS, scatter.value, grad.origins, context, dtype)
    adder, adder_args, index = _print_adder(scatter, suffix, context, dtype)
    return PrintedScatter(
        lines=(*value.lines, PrintedLine(""), PrintedLine(""), *wrapped_lines(adder)),
        contribution=value,
        scatter=f"scatter_{suffix}",
        carried="" if walked in scatter.axes else f"grad_{suffix}",
        scatter_args=adder_args,
        prelude=tuple(dict.fromkeys((*value.prelude, *index.prelude))),
        libdevice=value.libdevice or index.libdevice,
        axes=scatter.axes,
    )


def _print_adder(
    scatter: Scatter, suffix: str, context: PrintContext, dtype: torch.dtype
) -> tuple[list[PrintedLine], tuple[Arg, ...], NodePrinter]:
    """Print the function that adds values to the gradient buffer, where their index lies in it."""
    buffer = context.buffers[scatter.buffer]
    taken = {"value", "exists", *reserved_names(INDICES, context)}
    printer = NodePrinter(context, {n: n for n in INDICES}, lambda node: None, taken)
    pointer = Arg(f"grad_{buffer.name}_ptr", Role.BUFFER_GRAD, buffer.name, None, pointer_type(dtype), True)
    address, terms = Expression(pointer.name), [Expression("exists")]
    strides: list[Arg] = []
    for dim, index in enumerate(scatter.indices):
        printer.print(index)
        printer.name_index(buffer, dim, index)
        position = printer.expression(index)
        if buffer.name in context.wide and printer.computed_dtype(index) != torch.int64:
            position = Expression(f"({position.text}).to(tl.int64)")
        width = "i64" if buffer.name in context.wide else "i32"
        stride = Arg(f"grad_{buffer.name}_stride{dim}", Role.BUFFER_GRAD_STRIDE, buffer.name, dim, width, True)
        strides.append(stride)
        offset = binary("*", Precedence.MULTIPLY, position, Expression(stride.name))
        address = binary("+", Precedence.ADD, address, offset)
        terms += printer.bounds(buffer, dim, index)
    mask = terms[0]
    for term in terms[1:]:
        mask = binary("&", Precedence.AND, mask, term)
    args = tuple(dict.fromkeys((pointer, *strides, *printer.args.values())))
    names = ", ".join(["value", "exists", *INDICES, *(arg.name for arg in args)])
    lines = [
        PrintedLine("@triton.jit"),
        PrintedLine(f"def scatter_{suffix}({names}):"),
        PrintedLine(f'    """Add values to the gradient of {buffer.name}; many may meet in one element."""'),
        *(PrintedLine(f"    {a.name} = {a.text}") for a in printer.assignments),
        PrintedLine(f'    tl.atomic_add({address.text}, value, mask={mask.text}, sem="relaxed")'),
    ]
    return lines, args, printer


def calls(
    scatter: PrintedScatter, indices: dict[str, str], *, is_dq: bool, exists: str, dtype: torch.dtype
) -> ScatterCalls:
    """Return the statements with which a kernel uses a scatter.

    Args:
        indices: texts of b, h, q_idx and kv_idx inside the loop.
        exists: the condition that an own position exists, "" where all do.
    """
    own = Axis.Q if is_dq else Axis.KV
    value = f"value_{scatter.scatter.removeprefix('scatter_')}"
    names = [arg.name for arg in scatter.scatter_args]
    if not scatter.carried:
        call = f"{scatter.scatter}({', '.join([value, 'counts', *indices.values(), *names])})"
        return ScatterCalls(value, scatter.contribution.call(score="score", grad="grad_score", **indices), call, "", "")
    by_row = own in scatter.axes
    block = "BLOCK_M" if is_dq else "BLOCK_N"
    total = f"tl.sum({value}, 1)" if by_row else f"tl.sum(tl.sum({value}, 1), 0)"
    zero = f"tl.zeros([{block}], {type_name(dtype)})" if by_row else f"tl.full([], 0.0, {type_name(dtype)})"
    at = {
        "b": "b",
        "h": "h",
        "q_idx": "q_idx" if is_dq and by_row else "0",
        "kv_idx": "0" if is_dq or not by_row else "kv_idx",
    }
    counts = exists if by_row and exists else f"{scatter.carried} == {scatter.carried}"
    flush = f"{scatter.scatter}({', '.join([scatter.carried, counts, *at.values(), *names])})"
    contribution = scatter.contribution.call(score="score", grad="grad_score", **indices)
    return ScatterCalls(value, contribution, f"{scatter.carried} += {total}", f"{scatter.carried} = {zero}", flush)
