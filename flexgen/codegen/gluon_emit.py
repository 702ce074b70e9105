"""Emits a Gluon kernel for Hopper: a pure function from (mods, plan) to the text of a stand-alone module."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexgen.codegen.dialects.gluon import SPELLINGS, helpers_in, translate
from flexgen.codegen.dialects.triton import Dialect
from flexgen.codegen.emit import LOG2_E, mod_context, row_max_floor
from flexgen.codegen.gluon_header import gluon_header
from flexgen.codegen.gluon_text import GluonHoles, GluonText
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import MOD_INPUTS, PrintedLine, PrintedMod, print_function, print_mod
from flexgen.codegen.module_text import Variable, render_module
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.render import render_part
from flexgen.codegen.source import KernelSource
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS, GluonPlan, Template
from flexgen.lowering.score_fold import ScoreFold

TEMPLATES = {Template.WARP_SPECIALISED: "forward_ws", Template.ONE_WARPGROUP: "forward_one"}


def emit_gluon(mods: Mods, origins: Origins, plan: GluonPlan) -> KernelSource:
    """Return the forward kernel of a plan."""
    context = mod_context(mods, Dialect(hardware=True, fast_tanh=plan.FAST_TANH), plan.wide, False)
    score = _print_score(plan.score, origins, context) if plan.score else None
    mask = print_mod(mods.mask, origins, context, plan.accumulator_dtype) if mods.mask else None
    text = GluonText(plan, score, mask, context)
    holes = text.holes()
    used = [mod for mod in (score, text.mask) if mod is not None]
    printed = [in_gluon(mod) for mod in used]
    functions = [*_prelude(used, holes, text), *("\n".join(line.text for line in mod.lines) for mod in printed)]
    module = render_module(
        f"gluon_hopper/{TEMPLATES[plan.template]}.py.jinja",
        printed=printed,
        header=gluon_header(mods, plan),
        plan=plan,
        holes=holes,
        spelling=SPELLINGS[plan.spelling],
        variables=_variables(plan, holes),
        functions=functions,
    )
    return KernelSource(module.text, "forward", holes.args, module.line_map, kernel_key(mods, origins, plan))


def _print_score(fold: ScoreFold, origins: Origins, context: PrintContext) -> PrintedMod:
    if fold.before == fold.after == 1.0:
        return print_mod(fold.graph, origins, context, torch.float32)
    doc = f"{fold.graph.name}: the score of one (query, key) pair, without the factors in SCORE_SCALE, WEIGHT_SCALE."
    inputs = MOD_INPUTS["score"]
    return print_function("score_mod", doc, inputs, fold.graph.root, fold.origins(origins), context, torch.float32)


def in_gluon(mod: PrintedMod) -> PrintedMod:
    """Return a printed mod in Gluon's words."""
    return replace(mod, lines=tuple(PrintedLine(translate(line.text), line.span) for line in mod.lines))


def _prelude(used: list[PrintedMod], holes: GluonHoles, text: GluonText) -> list[str]:
    """Return the functions that the mods, the key ranges and the template call."""
    names = dict.fromkeys(name for mod in used for name in mod.prelude) | dict.fromkeys(holes.prelude)
    plain = [render_part(f"triton/prelude/{name}.py.jinja") for name in names]
    own = helpers_in([line.text for mod in used for line in mod.lines] + plain)
    own += ["keep_interval"] if text.live else []
    return [*(render_part(f"gluon_hopper/prelude/{name}.py.jinja") for name in own), *map(translate, plain)]


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
    if holes.listed:
        found.append(Variable("SPARSE_Q_BLOCK_SIZE", str(plan.SPARSE_Q_BLOCK_SIZE)))
        found += [Variable("SPARSE_KV_BLOCK_SIZE", str(plan.SPARSE_KV_BLOCK_SIZE))] * (holes.walk == "key_table")
        tiles = plan.SPARSE_KV_BLOCK_SIZE // plan.BLOCK_N
        found += [Variable("TILES_PER_BLOCK", str(tiles), "key tiles of a listed block")] * (tiles > 1)
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
    """Return the constants of the softmax: of scores, of weights, and where row maxima start."""
    before, after = (plan.score.before, plan.score.after) if plan.score else (1.0, 1.0)
    found = []
    if plan.SM_SCALE is not None and holes.scale_score:
        comment = f"the softmax scale times {before:.6g}, score_mod's factor" if before != 1.0 else "the softmax scale"
        found.append(Variable("SCORE_SCALE", repr(plan.SM_SCALE * before), comment))
    scale = plan.SM_SCALE if plan.FOLD_SCALE and plan.SM_SCALE is not None else after
    if holes.uses_maximum and scale != 1.0:
        found.append(Variable("MAX_SCALE", repr(scale), "of a row maximum, to be a score"))
    if plan.FOLD_SCALE:
        comment = "log2(e) times the softmax scale"
    else:
        comment = f"log2(e) times {after:.6g}, score_mod's factor" if after != 1.0 else "log2(e)"
    found.append(Variable("WEIGHT_SCALE", repr(scale * LOG2_E), f"{comment}; in base 2"))
    return [*found, row_max_floor(plan.SUBTRACT_FIRST, scale * LOG2_E)]
