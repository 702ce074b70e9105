"""The docstring at the top of a Gluon module: which case it is for, and why it is the way it is."""

from __future__ import annotations

from flexgen.codegen.header import row
from flexgen.ir.graph import Mods
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan, Sums
from flexgen.lowering.gluon_hopper.choose import decision
from flexgen.lowering.gluon_hopper.plan import GluonPlan, Template
from flexgen.lowering.triton.backward_plan import BackwardKernel

SUMS = {Sums.QUERY: "dQ", Sums.KEY_AND_VALUE: "dK and dV", Sums.KEY: "dK", Sums.VALUE: "dV"}
FLAGS = ("KV_TAIL", "SAFE_HEAD_DIM", "FOLD_SCALE", "FAST_TANH", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX")


def gluon_header(mods: Mods, plan: GluonPlan) -> str:
    """Return the module docstring."""
    rows = [
        ("score_mod", mods.score.name if mods.score else "none: softmax of scaled products"),
        ("mask_mod", mods.mask.name if mods.mask else "none: every key is live"),
        ("backend", f"Gluon, {_warps(plan)}   because: {_because(plan, 'template')}"),
        ("tile", f"{plan.BLOCK_M} query rows x {plan.BLOCK_N} keys, {_stages(plan)}, {plan.shared_bytes} bytes"),
        ("keys", "\n".join([plan.schedule.because, *(segment.because for segment in plan.schedule.segments)])),
        ("mask", _mask(mods, plan)),
        ("rows", f"{_order(plan)}   because: {_because(plan, 'LONG_ROWS_FIRST')}"),
        ("programs", f"{_programs(plan)}   because: {_because(plan, 'PERSISTENT')}"),
        ("rows safe", _yes(plan.ROWS_GUARANTEED_SAFE, _because(plan, "ROWS_GUARANTEED_SAFE"))),
        ("flags", ", ".join(f"{name}={getattr(plan, name)}" for name in FLAGS)),
    ]
    body = "\n".join(row(label, text) for label, text in rows)
    return f'"""Fused attention, forward, for {plan.target.name}. Written by flexgen.\n\n{body}\n"""'


def gluon_backward_header(mods: Mods, plan: GluonBackwardPlan) -> str:
    """Return the module docstring of a backward kernel."""
    is_dq = plan.kernel is BackwardKernel.DQ
    walked = "keys" if is_dq else "queries"
    rings = ("keys", "values") if is_dq else ("queries", "output gradients")
    stages = f"{plan.num_stages} stages of {rings[0]}, {plan.PARTNER_STAGES} of {rings[1]}"
    warps = f"a producer warp and {plan.CONSUMERS} consumer warpgroups of 64 {'queries' if is_dq else 'keys'}"
    masked = mods.mask is not None or plan.WALKED_TAIL
    mask = "mask_mod, on tiles that are not full" if masked else "none is applied: every tile is full"
    if masked and plan.live is not None:
        mask = "one unsigned compare of a distance from where live pairs begin, on tiles that are not full"
    pipeline = "yes" if plan.PIPELINED else "no"
    flags = ("WALKED_TAIL", "SAFE_HEAD_DIM", "FOLD_SCALE", "SUBTRACT_FIRST", "FAST_TANH", "LONG_ROWS_FIRST")
    rows = [
        ("score_mod", mods.score.name if mods.score else "none: softmax of scaled products"),
        ("mask_mod", mods.mask.name if mods.mask else "none: every key is live"),
        ("backend", f"Gluon, {warps}   because: {_because(plan, 'BACKEND')}"),
        ("tile", f"{plan.BLOCK_M} queries x {plan.BLOCK_N} keys, {stages}, {plan.shared_bytes} bytes"),
        ("pipelined", f"{pipeline}   because: {_because(plan, 'PIPELINED')}"),
        (walked, "\n".join([plan.schedule.because, *(segment.because for segment in plan.schedule.segments)])),
        ("mask", mask),
        ("flags", ", ".join(f"{name}={getattr(plan, name)}" for name in flags)),
    ]
    body = "\n".join(row(label, text) for label, text in rows)
    title = f"Fused attention, backward, {SUMS[plan.sums]}, for {plan.target.name}"
    return f'"""{title}. Written by flexgen.\n\n{body}\n"""'


def _warps(plan: GluonPlan) -> str:
    if plan.template is Template.ONE_WARPGROUP:
        return "one warpgroup that issues its own copies"
    return f"a producer warp and {plan.CONSUMERS} consumer warpgroups of 64 rows"


def _stages(plan: GluonPlan) -> str:
    if plan.num_stages == plan.VALUE_STAGES:
        return f"{plan.num_stages} stages"
    return f"{plan.num_stages} stages of keys, {plan.VALUE_STAGES} of values"


def _mask(mods: Mods, plan: GluonPlan) -> str:
    if mods.mask is None and not plan.KV_TAIL:
        return "none is applied: every key tile is full"
    if plan.live_keys is not None:
        return "one unsigned compare of a key's distance from a row's first live key, on tiles that are not full"
    return "mask_mod, on tiles that are not full"


def _order(plan: GluonPlan) -> str:
    return "the last ones first" if plan.LONG_ROWS_FIRST else "head after head"


def _programs(plan: GluonPlan) -> str:
    return "one for each multiprocessor" if plan.PERSISTENT else "one for each tile of rows"


def _yes(value: bool, because: str) -> str:
    return f"{'yes' if value else 'no'}   because: {because}"


def _because(plan: GluonPlan | GluonBackwardPlan, name: str) -> str:
    return decision(plan, name).because
