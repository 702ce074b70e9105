"""Emits the backward kernels: delta, dQ, and dK with dV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flexgen.codegen.backward_text import BackwardHoles, BackwardText
from flexgen.codegen.dialects.triton import Dialect, pointer_type, type_name
from flexgen.codegen.dropout_text import dropout_functions
from flexgen.codegen.emit import LOG2_E, mod_context, search_width
from flexgen.codegen.header import backward_header, delta_header
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import PrintedMod, print_function, print_mod
from flexgen.codegen.module_text import PrintedFunction, Variable, render_module
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.render import render_part
from flexgen.codegen.scatter_printer import PrintedScatter, print_scatters
from flexgen.codegen.source import Arg, KernelSource, Role
from flexgen.ir.graph import Axis, Mods
from flexgen.ir.origins import Origins
from flexgen.ir.score_grad import GRAD_INPUTS, ScoreGrad
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan, DeltaPlan


@dataclass(frozen=True, slots=True)
class DeltaHoles:
    """What the delta template prints besides the plan."""

    params: tuple[str, ...]
    output_address: str
    grad_output_address: str
    accumulator: str
    has_grad_logsumexp: bool
    log2_e: str
    shift: str


def emit_backward(mods: Mods, origins: Origins, grad: ScoreGrad | None, plan: BackwardPlan) -> KernelSource:
    """Return the kernel of a backward plan.

    Args:
        grad: gradients of the score mod; None where there is none.
    """
    context = mod_context(
        mods, Dialect(plan.target.backend == "cuda", fast_tanh=plan.FAST_TANH), plan.wide, plan.wide_index
    )
    score = print_mod(mods.score, origins, context, plan.accumulator_dtype) if mods.score else None
    mask = print_mod(mods.mask, origins, context, plan.accumulator_dtype) if mods.mask else None
    through = _print_grad(grad, context, plan) if grad else None
    scatters = _print_scatters(grad, context, plan) if grad else ()
    holes = BackwardText(plan, score, mask, through, scatters, context).holes()
    printed = [mod for mod in (score, mask, through) if mod is not None]
    variables = _variables(plan, holes)
    module = render_module(
        f"triton/{plan.kernel.value}.py.jinja",
        printed=[*printed, *scatters],
        optional=variables,
        header=backward_header(mods, plan),
        plan=plan,
        holes=holes,
        variables=variables,
        functions=[*_functions([*printed, *scatters], holes), *_dropout_functions(plan)],
        libdevice=any(mod.libdevice for mod in printed) or any(scatter.libdevice for scatter in scatters),
    )
    return KernelSource(module.text, plan.kernel.value, holes.args, module.line_map, kernel_key(mods, origins, plan))


def _print_grad(grad: ScoreGrad, context: PrintContext, plan: BackwardPlan) -> PrintedMod | None:
    if grad.is_identity or not (plan.WRITE_GRAD_QUERY or plan.WRITE_GRAD_KEY):
        return None
    doc = "The gradient of each raw score, from that of what score_mod returned."
    return print_function("score_grad", doc, GRAD_INPUTS, grad.dscore, grad.origins, context, plan.accumulator_dtype)


def _print_scatters(grad: ScoreGrad, context: PrintContext, plan: BackwardPlan) -> tuple[PrintedScatter, ...]:
    walked = Axis.KV if plan.kernel is BackwardKernel.DQ else Axis.Q
    return print_scatters(grad, plan.scatter, walked, context, plan.accumulator_dtype, plan.accumulation)


class _Printed(PrintedFunction, Protocol):
    """Functions that may call those of the prelude."""

    @property
    def prelude(self) -> tuple[str, ...]: ...


def _functions(parts: Sequence[_Printed], holes: BackwardHoles) -> list[str]:
    prelude = dict.fromkeys(name for part in parts for name in part.prelude) | dict.fromkeys(holes.prelude)
    texts = [render_part(f"triton/prelude/{name}.py.jinja") for name in prelude]
    return texts + ["\n".join(line.text for line in part.lines) for part in parts]


def _dropout_functions(plan: BackwardPlan) -> list[str]:
    return dropout_functions(plan.DROPOUT, transposed=plan.kernel is BackwardKernel.DKDV)


def _variables(plan: BackwardPlan, holes: BackwardHoles) -> list[Variable]:
    names = ["BLOCK_M", "BLOCK_N", "QK_HEAD_DIM", "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED"]
    names += ["GQA_SHARED_HEADS"]
    names += ["SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE"] if holes.table else []
    variables = [Variable(name, str(getattr(plan, name))) for name in names]
    if plan.index_map.packs_sequences:
        variables.append(search_width(plan.SEARCH_WIDTH))
    if plan.SM_SCALE is not None:
        variables.append(Variable("SM_SCALE", repr(plan.SM_SCALE)))
        if plan.FOLD_SCALE:
            variables.append(Variable("SCALE_LOG2_E", repr(plan.SM_SCALE * LOG2_E), "SM_SCALE * log2(e)"))
    return [*variables, Variable("LOG2_E", repr(LOG2_E), "weights are computed in base 2")]


def emit_delta(plan: DeltaPlan) -> KernelSource:
    """Return the kernel that prepares the rows for the backward kernels."""
    accumulator, dtype = plan.accumulator_dtype, plan.dtype
    tensors = {"output": dtype, "grad_output": dtype, "logsumexp": accumulator}
    tensors |= {"grad_logsumexp": accumulator} if plan.has_grad_logsumexp else {}
    tensors |= {"delta": accumulator, "row_shift": accumulator}
    tensors |= dict.fromkeys(("logsumexp_tail", "row_tail"), accumulator) if plan.rows.writes_tail else {}
    args = [Arg(f"{name}_ptr", Role.TENSOR, name, None, pointer_type(kind), True) for name, kind in tensors.items()]
    strided = ["output", "grad_output", *["grad_logsumexp"] * plan.has_grad_logsumexp]
    for name in strided:
        row = "i64" if name in plan.wide else "i32"
        for dim, (axis, width) in enumerate((("b", "i64"), ("h", "i64"), ("q", row))):
            args.append(Arg(f"{name}_stride_{axis}", Role.TENSOR_STRIDE, name, dim, width, True))
    if "grad_output" not in plan.unit_stride:
        args.append(Arg("grad_output_stride_d", Role.TENSOR_STRIDE, "grad_output", 3, "i32", True))
    args += [Arg(name, Role.LENGTH, name, None, "i32", False) for name in ("Q_LEN", "Q_HEADS")]
    holes = DeltaHoles(
        params=tuple(arg.name for arg in args),
        output_address=_row_address("output", plan, unit=True),
        grad_output_address=_row_address("grad_output", plan, unit="grad_output" in plan.unit_stride),
        accumulator=type_name(accumulator),
        has_grad_logsumexp=plan.has_grad_logsumexp,
        log2_e=repr(LOG2_E),
        shift="logsumexp * LOG2_E" if plan.rows.BASE_2 else "logsumexp",
    )
    module = render_module("triton/backward_delta.py.jinja", header=delta_header(plan), plan=plan, holes=holes)
    key = kernel_key(Mods(), Origins(), plan)
    return KernelSource(module.text, "backward_delta", tuple(args), module.line_map, key)


def _row_address(tensor: str, plan: DeltaPlan, *, unit: bool) -> str:
    row = "row[:, None].to(tl.int64)" if tensor in plan.wide else "row[:, None]"
    along = "v_dim[None, :]" if unit else f"v_dim[None, :] * {tensor}_stride_d"
    return f"{tensor}_ptr + {row} * {tensor}_stride_q + {along}"
