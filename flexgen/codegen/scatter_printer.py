"""Prints how a backward kernel accumulates gradients of captured buffers: two device functions for each scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.expression import Expression, Precedence, binary
from flexgen.codegen.mod_printer import PrintedLine, PrintedMod, print_function, reserved_names, wrapped_lines
from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg, Role
from flexgen.ir.graph import Axis
from flexgen.ir.score_grad import GRAD_INPUTS, Scatter, ScoreGrad
from flexgen.lowering.triton.backward_plan import Accumulation, ScatterSite

INDICES = ("b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True, slots=True)
class PrintedScatter:
    """The device functions of one scatter, and how the kernel calls them.

    Attributes:
        lines: both functions, at column 0.
        contribution: the function that computes each pair's value.
        scatter: name of the function that adds values, or measures them.
        places: whether that function takes where the values belong.
        suffix: ends the names of both, and of variables.
        carried: the accumulator the loop carries where the element does not change along the walked axis; "" where
            every tile is added at once.
        scatter_args: what the latter takes after its own arguments.
        prelude, libdevice: as in PrintedMod.
        axes: the axes that the element depends on.
    """

    lines: tuple[PrintedLine, ...]
    contribution: PrintedMod
    scatter: str
    places: bool
    suffix: str
    carried: str
    scatter_args: tuple[Arg, ...]
    prelude: tuple[str, ...]
    libdevice: bool
    axes: frozenset[Axis]

    @property
    def args(self) -> tuple[Arg, ...]:
        return tuple(dict.fromkeys((*self.contribution.args, *self.scatter_args)))

    def call(self, value: str, exists: str, indices: Mapping[str, str]) -> str:
        """Return the statement that adds a value up, or measures it: what does not exist is 0 then."""
        where = [exists, *indices.values()] if self.places else []
        return f"{self.scatter}({', '.join([value, *where, *(arg.name for arg in self.scatter_args)])})"


@dataclass(frozen=True, slots=True)
class ScatterCalls:
    """The statements of one scatter in a kernel.

    Attributes:
        name, value: the tile of contributions, inside the loop.
        zeroed: contributions of pairs that do not count must be 0; else what adds them up leaves them out.
        add: what the loop does with it.
        start, flush: before the loop and after it; "" where every tile is added at once.
    """

    name: str
    value: str
    zeroed: bool
    add: str
    start: str
    flush: str


def print_scatters(
    grad: ScoreGrad,
    sites: Sequence[ScatterSite],
    walked: Axis,
    context: PrintContext,
    dtype: torch.dtype,
    accumulation: Accumulation,
) -> tuple[PrintedScatter, ...]:
    """Print the scatters that one kernel accumulates.

    Args:
        grad: the gradients they belong to.
        sites: those of this kernel.
        walked: the axis that the kernel's loop walks.
        dtype: of the accumulated gradients.
        accumulation: how they are added up.
    """
    taken: set[str] = set()
    printed = []
    for site in sites:
        scatter = [scatter for scatter in grad.scatters if scatter.buffer == site.buffer][site.place]
        suffix = _fresh(scatter.buffer, taken)
        doc = f"What each (query, key) pair adds to the gradient of {scatter.buffer}."
        value = print_function(f"contribution_{suffix}", doc, GRAD_INPUTS, scatter.value, grad.origins, context, dtype)
        adder = _print_adder(scatter, suffix, context, dtype, accumulation)
        printed.append(_joined(scatter, suffix, value, adder, walked))
    return tuple(printed)


def _fresh(name: str, taken: set[str]) -> str:
    suffix, count = name, 1
    while suffix in taken:
        count += 1
        suffix = f"{name}_{count}"
    taken.add(suffix)
    return suffix


@dataclass(frozen=True, slots=True)
class _Adder:
    """The function that adds values up: its name and lines, what it takes after its own arguments, what it calls."""

    name: str
    lines: list[PrintedLine]
    args: tuple[Arg, ...]
    places: bool
    prelude: tuple[str, ...] = ()
    libdevice: bool = False


def _joined(scatter: Scatter, suffix: str, value: PrintedMod, adder: _Adder, walked: Axis) -> PrintedScatter:
    return PrintedScatter(
        lines=(*value.lines, PrintedLine(""), PrintedLine(""), *wrapped_lines(adder.lines)),
        contribution=value,
        scatter=adder.name,
        places=adder.places,
        suffix=suffix,
        carried="" if walked in scatter.axes else f"grad_{suffix}",
        scatter_args=adder.args,
        prelude=tuple(dict.fromkeys((*value.prelude, *adder.prelude))),
        libdevice=value.libdevice or adder.libdevice,
        axes=scatter.axes,
    )


def _print_adder(
    scatter: Scatter, suffix: str, context: PrintContext, dtype: torch.dtype, accumulation: Accumulation
) -> _Adder:
    match accumulation:
        case Accumulation.MEASURE:
            return _measurer(scatter, suffix, dtype)
        case Accumulation.FLOAT:
            return _atomic_adder(scatter, suffix, context, "value", pointer_type(dtype), ())
    name = scatter.buffer
    scale = Arg(f"scale_of_{name}_ptr", Role.TENSOR, f"scale of {name}", None, pointer_type(dtype), True)
    units = f"tl.floor(value * tl.load({scale.name}) + 0.5).to(tl.int64)"
    return _atomic_adder(scatter, suffix, context, units, pointer_type(torch.int64), (scale,))


def _measurer(scatter: Scatter, suffix: str, dtype: torch.dtype) -> _Adder:
    """Print the function that measures values: a tile of them, a row, or one where the element is one of b and h."""
    buffer, is_one = scatter.buffer, not scatter.axes & {Axis.Q, Axis.KV}
    largest = Arg(f"largest_of_{buffer}_ptr", Role.TENSOR, f"largest of {buffer}", None, pointer_type(dtype), True)
    lines = [
        "@triton.jit",
        f"def measure_{suffix}(value, {largest.name}):",
        f'    """Note the largest magnitude that is added to the gradient of {buffer}; NaN counts as infinite."""',
        '    magnitude = tl.where(value == value, tl.abs(value), float("inf"))',
        f'    tl.atomic_max({largest.name}, {"magnitude" if is_one else "tl.max(magnitude, None)"}, sem="relaxed")',
    ]
    return _Adder(f"measure_{suffix}", [PrintedLine(line) for line in lines], (largest,), places=False)


def _atomic_adder(
    scatter: Scatter, suffix: str, context: PrintContext, added: str, pointer_kind: str, more: tuple[Arg, ...]
) -> _Adder:
    """Print the function that adds values to the gradient buffer, where their index lies in it.

    Args:
        added: the text of what is added.
        pointer_kind: the type of the gradient buffer.
        more: arguments that `added` needs.
    """
    buffer = context.buffers[scatter.buffer]
    taken = {"value", "exists", *(arg.name for arg in more), *reserved_names(INDICES, context)}
    printer = NodePrinter(context, {n: n for n in INDICES}, lambda node: None, taken)
    pointer = Arg(f"grad_{buffer.name}_ptr", Role.BUFFER_GRAD, buffer.name, None, pointer_kind, True)
    address, mask, strides = _place(scatter, printer, context, pointer)
    args = tuple(dict.fromkeys((pointer, *strides, *printer.args.values(), *more)))
    names = ", ".join(["value", "exists", *INDICES, *(arg.name for arg in args)])
    lines = [
        PrintedLine("@triton.jit"),
        PrintedLine(f"def scatter_{suffix}({names}):"),
        PrintedLine(f'    """Add values to the gradient of {buffer.name}; many may meet in one element."""'),
        *(PrintedLine(f"    {a.name} = {a.text}") for a in printer.assignments),
        PrintedLine(f'    tl.atomic_add({address.text}, {added}, mask={mask.text}, sem="relaxed")'),
    ]
    return _Adder(f"scatter_{suffix}", lines, args, True, tuple(printer.prelude), printer.libdevice)


def _place(
    scatter: Scatter, printer: NodePrinter, context: PrintContext, pointer: Arg
) -> tuple[Expression, Expression, list[Arg]]:
    """Print where an element lies in the gradient buffer, and whether it lies there; return the strides too."""
    buffer = context.buffers[scatter.buffer]
    wide = buffer.name in context.wide
    address, mask = Expression(pointer.name), Expression("exists")
    strides: list[Arg] = []
    for dim, index in enumerate(scatter.indices):
        printer.print(index)
        printer.name_index(buffer, dim, index)
        position = printer.expression(index)
        if wide and printer.computed_dtype(index) != torch.int64:
            position = Expression(f"({position.text}).to(tl.int64)")
        name, width = f"grad_{buffer.name}_stride{dim}", "i64" if wide else "i32"
        strides.append(Arg(name, Role.BUFFER_GRAD_STRIDE, buffer.name, dim, width, True))
        offset = binary("*", Precedence.MULTIPLY, position, Expression(name))
        address = binary("+", Precedence.ADD, address, offset)
        for term in printer.bounds(buffer, dim, index):
            mask = binary("&", Precedence.AND, mask, term)
    return address, mask, strides


def calls(
    scatter: PrintedScatter, indices: dict[str, str], *, is_dq: bool, exists: str, dtype: torch.dtype
) -> ScatterCalls:
    """Return the statements with which a kernel uses a scatter.

    Args:
        indices: texts of b, h, q_idx and kv_idx inside the loop.
        exists: the condition that an own position exists, "" where all do.
    """
    value, carried = f"share_of_{scatter.suffix}", scatter.carried
    contribution = scatter.contribution.call(score="score", grad="grad_score", **indices)
    if not carried:
        return ScatterCalls(value, contribution, not scatter.places, scatter.call(value, "counts", indices), "", "")
    own, block = ("q_idx", "BLOCK_M") if is_dq else ("kv_idx", "BLOCK_N")
    by_row = (Axis.Q if is_dq else Axis.KV) in scatter.axes
    total = f"tl.sum({value}, 1)" if by_row else f"tl.sum(tl.sum({value}, 1), 0)"
    shape = f"[{block}]" if by_row else "[]"
    at = {"b": "b", "h": "h", "q_idx": "0", "kv_idx": "0"} | ({own: own} if by_row else {})
    counts = exists if by_row and exists else f"tl.full({shape}, True, tl.int1)"
    start = f"{carried} = tl.full({shape}, 0.0, {type_name(dtype)})"
    return ScatterCalls(value, contribution, True, f"{carried} += {total}", start, scatter.call(carried, counts, at))
