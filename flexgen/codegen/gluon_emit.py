"""Emits a Gluon kernel for Hopper: a pure function from (mods, plan) to the text of a stand-alone module."""

from __future__ import annotations

from dataclasses import replace

from flexgen.codegen.dialects.gluon import helpers_in, translate
from flexgen.codegen.dialects.triton import Dialect
from flexgen.codegen.emit import LOG2_E, Variable, line_map, mod_context, row_max_floor
from flexgen.codegen.gluon_header import gluon_header
from flexgen.codegen.gluon_text import GluonHoles, GluonText
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import PrintedLine, PrintedMod, print_mod
from flexgen.codegen.render import render
from flexgen.codegen.source import KernelSource
from flexgen.codegen.wrap import wrap_long_lines
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS, GluonPlan, Template

TEMPLATES = {Template.WARP_SPECIALISED: "forward_ws", Template.ONE_WARPGROUP: "forward_one"}


def emit_gluon(mods: Mods, origins: Origins, plan: GluonPlan) -> KernelSource:
    """Return the forward kernel of a plan."""
    context = mod_context(mods, Dialect(hardware=True, fast_tanh=plan.FAST_TANH), plan.wide, False)
    score = print_mod(mods.score, origins, context, plan.accumulator_dtype) if mods.score else None
    mask = print_mod(mods.mask, origins, context, plan.accumulator_dtype) if mods.mask else None
    text = GluonText(plan, score, mask, context)
    holes = text.holes()
    used = [mod for mod in (score, text.mask) if mod is not None]
    printed = [_in_gluon(mod) for mod in used]
    module = wrap_long_lines(
        render(
            f"gluon_hopper/{TEMPLATES[plan.template]}.py.jinja",
            header=gluon_header(mods, plan),
            plan=plan,
            holes=holes,
            variables=_variables(plan, holes),
            functions=[*_prelude(used, holes, text), *("\n".join(line.text for line in mod.lines) for mod in printed)],
        )
    )
    return KernelSource(module, "forward", holes.args, line_map(module, printed), kernel_key(mods, origins, plan))


def _in_gluon(mod: PrintedMod) -> PrintedMod:
    return replace(mod, lines=tuple(PrintedLine(translate(line.text), line.span) for line in mod.lines))


def _prelude(used: list[PrintedMod], holes: GluonHoles, text: GluonText) -> list[str]:
    """Return the functions that the mods, the key ranges and the template call."""
    names = dict.fromkeys(name for mod in used for name in mod.prelude) | dict.fromkeys(holes.prelude)
    plain = [render(f"triton/prelude/{name}.py.jinja").rstrip() for name in names]
    own = helpers_in([line.text for mod in used for line in mod.lines] + plain)
    own += ["keep_interval"] if text.live else []
    return [*(render(f"gluon_hopper/prelude/{name}.py.jinja").rstrip() for name in own), *map(translate, plain)]


def _variables(plan: GluonPlan, holes: GluonHoles) -> list[Variable]:
    rows = "query rows of a warpgroup" if plan.CONSUMERS > 1 else "query rows of a program"
    found = [
        Variable("BLOCK_M", str(plan.BLOCK_M), "query rows of a program"),
        Variable("ROWS", str(WARPGROUP_ROWS), rows),
        Variable("BLOCK_N", str(plan.BLOCK_N), "keys of a tile"),
    ]
    found += _resources(plan)
    found += [
        Variable("QK_HEAD_DIM_ROUNDED", str(plan.QK_HEAD_DIM_ROUNDED)),
        Variable("V_HEAD_DIM_ROUNDED", str(plan.V_HEAD_DIM_ROUNDED)),
    ]
    if plan.V_HEAD_DIM != plan.V_HEAD_DIM_ROUNDED:
        found.append(Variable("V_HEAD_DIM", str(plan.V_HEAD_DIM)))
    if plan.GQA_SHARED_HEADS > 1:
        found.append(Variable("GQA_SHARED_HEADS", str(plan.GQA_SHARED_HEADS)))
    return found + _numbers(plan, holes)


def _resources(plan: GluonPlan) -> list[Variable]:
    if plan.template is Template.ONE_WARPGROUP:
        return [
            Variable("KEY_STAGES", str(plan.num_stages), "key tiles in shared memory"),
            Variable("VALUE_STAGES", str(plan.VALUE_STAGES), "value tiles in shared memory"),
        ]
    return [
        Variable("CONSUMERS", str(plan.CONSUMERS), "warpgroups that compute"),
        Variable("STAGES", str(plan.num_stages), "slots of the ring: a key and a value tile each"),
        Variable("CONSUMER_REGISTERS", str(plan.CONSUMER_REGISTERS), "of a thread"),
        Variable("PRODUCER_REGISTERS", str(plan.PRODUCER_REGISTERS)),
    ]


def _numbers(plan: GluonPlan, holes: GluonHoles) -> list[Variable]:
    found = []
    folded = plan.FOLD_SCALE and plan.SM_SCALE is not None
    multiplier = plan.SM_SCALE * LOG2_E if folded and plan.SM_SCALE is not None else LOG2_E
    if plan.SM_SCALE is not None and (holes.scale_score or plan.OUTPUT_LOGSUMEXP or plan.OUTPUT_MAX):
        found.append(Variable("SM_SCALE", repr(plan.SM_SCALE)))
    comment = "the softmax scale times log2(e)" if folded else "weights are computed in base 2"
    found.append(Variable("SCALE_LOG2_E" if folded else "LOG2_E", repr(multiplier), comment))
    return [*found, row_max_floor(plan.SUBTRACT_FIRST, multiplier)]
