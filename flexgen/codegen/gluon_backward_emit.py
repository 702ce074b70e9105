"""Emits a Gluon backward kernel for Hopper: a pure function from (mods, gradients, plan) to a stand-alone module."""

from __future__ import annotations

import torch

from flexgen.codegen.dialects.gluon import SPELLINGS, helpers_in, translate
from flexgen.codegen.dialects.triton import Dialect
from flexgen.codegen.emit import LOG2_E, mod_context
from flexgen.codegen.gluon_backward_text import GluonBackwardHoles, GluonBackwardText
from flexgen.codegen.gluon_emit import in_gluon
from flexgen.codegen.gluon_header import gluon_backward_header
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import PrintedMod, print_function, print_mod
from flexgen.codegen.module_text import Variable, render_module
from flexgen.codegen.render import render_part
from flexgen.codegen.source import KernelSource
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.ir.score_grad import GRAD_INPUTS, ScoreGrad
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton.backward_plan import BackwardKernel


def emit_gluon_backward(mods: Mods, origins: Origins, grad: ScoreGrad | None, plan: GluonBackwardPlan) -> KernelSource:
    """Return the kernel of a backward plan.

    Args:
        grad: gradients of the score mod; None where there is none.
    """
    context = mod_context(mods, Dialect(hardware=True, fast_tanh=plan.FAST_TANH), plan.wide, False)
    score = print_mod(mods.score, origins, context, torch.float32) if mods.score else None
    mask = print_mod(mods.mask, origins, context, torch.float32) if mods.mask else None
    through, dscore = None, None
    if grad is not None and plan.differentiates_scores and not grad.is_identity:
        doc = "The gradient of each raw score, from that of what score_mod returned."
        through = print_function("score_grad", doc, GRAD_INPUTS, grad.dscore, grad.origins, context, torch.float32)
        dscore = grad.dscore
    text = GluonBackwardText(plan, score, mask, through, dscore, context)
    holes = text.holes()
    used = [mod for mod in (score, text.mask, through) if mod is not None]
    printed = [in_gluon(mod) for mod in used]
    functions = [*_prelude(used, holes, text), *("\n".join(line.text for line in mod.lines) for mod in printed)]
    template = "backward_dq" if plan.kernel is BackwardKernel.DQ else "backward_dkdv"
    module = render_module(
        f"gluon_hopper/{template}.py.jinja",
        printed=printed,
        header=gluon_backward_header(mods, plan),
        plan=plan,
        holes=holes,
        spelling=SPELLINGS[plan.spelling],
        variables=_variables(plan, holes),
        functions=functions,
        triton_words=any("tl." in function for function in functions),
    )
    return KernelSource(module.text, holes.entry, holes.args, module.line_map, kernel_key(mods, origins, plan))


def _prelude(used: list[PrintedMod], holes: GluonBackwardHoles, text: GluonBackwardText) -> list[str]:
    """Return the functions that the mods, the ranges and the template call."""
    names = dict.fromkeys(name for mod in used for name in mod.prelude) | dict.fromkeys(holes.prelude)
    plain = [render_part(f"triton/prelude/{name}.py.jinja") for name in names]
    own = helpers_in([line.text for mod in used for line in mod.lines] + plain)
    own += ["keep_interval"] if text.live else []
    return [*(render_part(f"gluon_hopper/prelude/{name}.py.jinja") for name in own), *map(translate, plain)]


def _variables(plan: GluonBackwardPlan, holes: GluonBackwardHoles) -> list[Variable]:
    is_dq = plan.kernel is BackwardKernel.DQ
    rings = (("KEY_STAGES", "key"), ("VALUE_STAGES", "value"))
    if not is_dq:
        rings = (("QUERY_STAGES", "query"), ("GRAD_STAGES", "output gradient"))
    blocks = {"BLOCK_M": "queries of a tile", "BLOCK_N": "keys of a tile"}
    blocks[holes.own.block] = f"{holes.own.plural} of a program"
    found = [Variable(name, str(getattr(plan, name)), comment) for name, comment in blocks.items()]
    found.append(Variable("ROWS", str(WARPGROUP_ROWS), f"{holes.own.plural} of a warpgroup"))
    found += [
        Variable("CONSUMERS", str(plan.CONSUMERS), "warpgroups that compute"),
        Variable(rings[0][0], str(plan.num_stages), f"{rings[0][1]} tiles in shared memory"),
        Variable(rings[1][0], str(plan.PARTNER_STAGES), f"{rings[1][1]} tiles in shared memory"),
        Variable("CONSUMER_REGISTERS", str(plan.CONSUMER_REGISTERS), "of a thread"),
        Variable("PRODUCER_REGISTERS", str(plan.PRODUCER_REGISTERS)),
        Variable("QK_HEAD_DIM_ROUNDED", str(plan.QK_HEAD_DIM_ROUNDED)),
        Variable("V_HEAD_DIM_ROUNDED", str(plan.V_HEAD_DIM_ROUNDED)),
    ]
    comment = "each head's values of rows begin at a multiple, as the copy engine wants"
    found.append(Variable("ROW_MULTIPLE", str(plan.rows.ROW_MULTIPLE), comment))
    found += [Variable(total.exact, str(getattr(plan, total.exact))) for total in holes.sums if total.padded]
    if holes.listed:
        found.append(Variable(holes.own.sparse, str(getattr(plan, holes.own.sparse))))
        walked, block = getattr(plan, holes.walked.sparse), getattr(plan, holes.walked.block)
        past = plan.schedule.walk is Walk.TABLE and plan.PIPELINED
        found += [Variable(holes.walked.sparse, str(walked))] * past
        if not holes.block_is_tile:
            found.append(Variable("TILES_PER_BLOCK", str(walked // block), "tiles of a listed block"))
    if plan.GQA_SHARED_HEADS > 1:
        found.append(Variable("GQA_SHARED_HEADS", str(plan.GQA_SHARED_HEADS)))
    return found + list(_numbers(plan, holes))


def _numbers(plan: GluonBackwardPlan, holes: GluonBackwardHoles) -> list[Variable]:
    found = []
    scaled = holes.scale_score or any(total.scaled for total in holes.sums)
    if plan.SM_SCALE is not None and scaled:
        found.append(Variable("SM_SCALE", repr(plan.SM_SCALE), "the softmax scale"))
    if plan.FOLD_SCALE and plan.SM_SCALE is not None:
        found.append(Variable("SCALE_LOG2_E", repr(plan.SM_SCALE * LOG2_E), "log2(e) times the softmax scale"))
    if not plan.FOLD_SCALE:
        found.append(Variable("LOG2_E", repr(LOG2_E), "weights are computed in base 2"))
    return found
