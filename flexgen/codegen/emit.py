"""Emits a kernel: a pure function from (mods, plan) to the text of a stand-alone module."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexgen.codegen.dialects.triton import Dialect
from flexgen.codegen.dropout_text import dropout_functions
from flexgen.codegen.forward_text import ForwardHoles, ForwardText
from flexgen.codegen.header import header
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import PrintedMod, print_mod
from flexgen.codegen.module_text import Variable, render_module
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.render import render_part
from flexgen.codegen.source import KernelSource
from flexgen.ir.graph import Mods, Node
from flexgen.ir.origins import Origins
from flexgen.ir.sizes import size_name
from flexgen.lowering.dropout import Draws
from flexgen.lowering.ranges import Range, RangeAnalysis
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.problem import INDEX_LIMIT, SIZE_LIMIT

LOG2_E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # the most negative finite float32
FLOOR = -2.0e38  # times log2(e) it is still finite


def emit_forward(mods: Mods, origins: Origins, plan: ForwardPlan) -> KernelSource:
    """Return the forward kernel of a plan."""
    context = print_context(mods, plan)
    score = print_mod(mods.score, origins, context, plan.accumulator_dtype) if mods.score else None
    mask = print_mod(mods.mask, origins, context, plan.accumulator_dtype) if mods.mask else None
    holes = ForwardText(plan, score, mask, context).holes()
    printed = [mod for mod in (score, mask) if mod is not None]
    variables = forward_variables(plan, holes)
    module = render_module(
        "triton/forward.py.jinja",
        printed=printed,
        optional=variables,
        header=header(mods, plan),
        plan=plan,
        holes=holes,
        variables=variables,
        functions=printed_functions(printed, holes, plan.DROPOUT),
        libdevice=any(mod.libdevice for mod in printed),
    )
    return KernelSource(module.text, "forward", holes.args, module.line_map, kernel_key(mods, origins, plan))


def printed_functions(mods: Sequence[PrintedMod], holes: ForwardHoles, draws: Draws) -> list[str]:
    """Return the texts of the functions that come before a kernel's own: what mods and bounds call, and the mods."""
    decodes = ["from_e4m3"] if "from_e4m3" in holes.key_conversion + holes.value_conversion else []
    prelude = dict.fromkeys(name for mod in mods for name in mod.prelude) | dict.fromkeys([*holes.prelude, *decodes])
    functions = [render_part(f"triton/prelude/{name}.py.jinja") for name in prelude]
    functions += ["\n".join(line.text for line in mod.lines) for mod in mods]
    return functions + dropout_functions(draws)


def print_context(mods: Mods, plan: ForwardPlan) -> PrintContext:
    """Return what the printers need: spelling, captured values, and ranges under the plan's guard."""
    dialect = Dialect(hardware=plan.target.backend == "cuda", fast_tanh=plan.FAST_TANH)
    return mod_context(mods, dialect, plan.wide, plan.wide_index)


def mod_context(mods: Mods, dialect: Dialect, wide: frozenset[str], wide_index: bool) -> PrintContext:
    """Return what the printers need, for a dialect and a guard's `wide` and `wide_index`."""
    limit = Range(0, 2**31 - 1 if wide_index else INDEX_LIMIT - 1)
    names = ("q_idx", "kv_idx", "q_lo", "q_hi", "kv_lo", "kv_hi", "Q_LEN", "KV_LEN")
    assumed = dict.fromkeys(names, limit) | dict.fromkeys(("b", "h", "h_lo", "h_hi"), Range(0, 2**24))
    sizes = {
        size_name(buffer.name, dim): Range(0, SIZE_LIMIT - 1)
        for buffer in mods.buffers
        for dim in range(buffer.rank)
        if buffer.name not in wide
    }
    scalars = {
        scalar.name: Range(-INDEX_LIMIT, INDEX_LIMIT)
        for scalar in mods.scalars
        if not scalar.dtype.is_floating_point and scalar.name not in wide
    }
    ranges: dict[str | Node, Range] = {}
    for known in (assumed, sizes, scalars):
        ranges.update(known)
    return PrintContext(
        dialect=dialect,
        buffers={buffer.name: buffer for buffer in mods.buffers},
        scalars={scalar.name: scalar for scalar in mods.scalars},
        wide=wide,
        analysis=RangeAnalysis(ranges),
    )


def forward_variables(plan: ForwardPlan, holes: ForwardHoles) -> list[Variable]:
    """Return the template variables of a forward kernel."""
    numbers = [Variable(name, str(getattr(plan, name))) for name in ("BLOCK_M", "BLOCK_N")]
    numbers += [
        Variable("QK_HEAD_DIM", str(plan.QK_HEAD_DIM)),
        Variable("QK_HEAD_DIM_ROUNDED", str(plan.QK_HEAD_DIM_ROUNDED)),
        Variable("V_HEAD_DIM", str(plan.V_HEAD_DIM)),
        Variable("V_HEAD_DIM_ROUNDED", str(plan.V_HEAD_DIM_ROUNDED)),
        Variable("GQA_SHARED_HEADS", str(plan.GQA_SHARED_HEADS)),
    ]
    if holes.table:
        numbers += [
            Variable("SPARSE_Q_BLOCK_SIZE", str(plan.SPARSE_Q_BLOCK_SIZE)),
            Variable("SPARSE_KV_BLOCK_SIZE", str(plan.SPARSE_KV_BLOCK_SIZE)),
        ]
    if plan.index_map.page_size:
        numbers.append(Variable("PAGE_SIZE", str(plan.index_map.page_size), "keys of a page"))
    if plan.index_map.packs_sequences:
        numbers.append(search_width(plan.SEARCH_WIDTH))
    if plan.SM_SCALE is not None:
        numbers.append(Variable("SM_SCALE", repr(plan.SM_SCALE)))
    multiplier = plan.SM_SCALE * LOG2_E if plan.FOLD_SCALE and plan.SM_SCALE is not None else LOG2_E
    name = "SCALE_LOG2_E" if plan.FOLD_SCALE else "LOG2_E"
    comment = "SM_SCALE * log2(e)" if plan.FOLD_SCALE else "weights are computed in base 2"
    numbers.append(Variable(name, repr(multiplier), comment))
    numbers.append(row_max_floor(plan.SUBTRACT_FIRST, multiplier))
    return numbers


def search_width(width: int) -> Variable:
    """Return how many sequences a tile compares at a time."""
    return Variable("SEARCH_WIDTH", str(width), "sequences that a tile compares at a time")


def row_max_floor(subtract_first: bool, multiplier: float) -> Variable:
    """Return what row maxima start from, where scores are multiplied by `multiplier` inside the exponential."""
    if subtract_first:
        return Variable("ROW_MAX_FLOOR", repr(LOWEST), "the lowest float32: any finite score is at least this")
    exponent = math.floor(math.log10(-FLOOR / max(multiplier, 1.0)))
    return Variable("ROW_MAX_FLOOR", repr(-(10.0**exponent)), "below any score; finite when scaled")
