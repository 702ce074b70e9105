"""Emits a decode kernel and the one that combines its splits: a pure function from (mods, plan) to a module's text."""

from __future__ import annotations

from dataclasses import replace

from flexgen.codegen.decode_text import DecodeText, combine_holes
from flexgen.codegen.emit import forward_variables, print_context, printed_functions
from flexgen.codegen.forward_text import ForwardHoles
from flexgen.codegen.header import decode_header
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import print_mod
from flexgen.codegen.module_text import Variable, render_module
from flexgen.codegen.source import KernelSource, SecondKernel
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.lowering.index_map import IndexMap
from flexgen.lowering.triton_decode.plan import DecodePlan


def emit_decode(mods: Mods, origins: Origins, plan: DecodePlan) -> KernelSource:
    """Return the kernels of a plan: `forward`, and `combine` for launches of more than one split."""
    context = print_context(mods, plan)
    score = print_mod(mods.score, origins, context, plan.accumulator_dtype) if mods.score else None
    mask = print_mod(mods.mask, origins, context, plan.accumulator_dtype) if mods.mask else None
    text = DecodeText(plan, score, mask, context)
    holes = text.holes()
    one_row = replace(plan, index_map=IndexMap())
    combining = combine_holes(one_row, holes)
    printed = [mod for mod in (score, mask) if mod is not None]
    variables = _variables(plan, holes)
    module = render_module(
        "triton/decode.py.jinja",
        printed=printed,
        optional=variables,
        header=decode_header(mods, plan),
        plan=plan,
        holes=holes,
        many_ranges=text.many_ranges,
        combine_plan=one_row,
        combine_holes=combining,
        variables=variables,
        functions=printed_functions(printed, holes, plan.DROPOUT),
        libdevice=any(mod.libdevice for mod in printed),
    )
    key = kernel_key(mods, origins, plan)
    second = SecondKernel("combine", combining.args)
    return KernelSource(module.text, "forward", holes.args, module.line_map, key, second)


def _variables(plan: DecodePlan, holes: ForwardHoles) -> list[Variable]:
    return [
        *forward_variables(plan, holes),
        Variable(
            "PARTIAL_WIDTH", str(plan.PARTIAL_WIDTH), "elements of a partial row: V_HEAD_DIM, then its maximum and sum"
        ),
        Variable("COMBINE_SPLITS", str(plan.COMBINE_SPLITS), "splits that are combined at a time"),
    ]
