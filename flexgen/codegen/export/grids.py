"""How many programs a kernel's launch has, as an expression of the host code: the counterpart of the launcher's."""

from __future__ import annotations

from collections.abc import Callable

from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.plans import AnyBackwardPlan, AnyForwardPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan, DeltaPlan

Cdiv = Callable[[str, str], str]  # the text of a division that rounds up
_PROCESSORS = "torch.cuda.get_device_properties(query.device).multi_processor_count"


def forward_grid(plan: AnyForwardPlan, block_m: str, cdiv: Cdiv) -> str:
    """Return how many programs the forward kernel has.

    Args:
        block_m: the expression of BLOCK_M.
    """
    if plan.index_map.packs_sequences:
        return f"({cdiv('q_len', block_m)} + sequences) * q_heads"
    if plan.index_map.packs:
        return f"{cdiv(f'q_len * {plan.GQA_SHARED_HEADS}', block_m)} * batch * kv_heads"
    tiles = f"{cdiv('q_len', block_m)} * batch * q_heads"
    return f"min({tiles}, {_PROCESSORS})" if isinstance(plan, GluonPlan) and plan.PERSISTENT else tiles


def delta_grid(plan: DeltaPlan, block_m: str, cdiv: Cdiv) -> str:
    """Return how many programs the kernel has that prepares rows: of those between heads too, where there are any."""
    multiple = plan.rows.ROW_MULTIPLE
    rows = "q_len" if multiple == 1 else f"{cdiv('q_len', str(multiple))} * {multiple}"
    return f"{cdiv(rows, block_m)} * batch * q_heads"


def backward_grid(plan: AnyBackwardPlan, block_m: str, block_n: str, cdiv: Cdiv) -> str:
    """Return how many programs a backward kernel has: its tiles of queries, or of keys."""
    owns_keys = plan.kernel is BackwardKernel.DKDV
    length, block, heads = ("kv_len", block_n, "kv_heads") if owns_keys else ("q_len", block_m, "q_heads")
    if isinstance(plan, BackwardPlan) and plan.index_map.packs_sequences:
        return f"({cdiv(length, block)} + sequences) * {heads}"
    return f"{cdiv(length, block)} * batch * {heads}"
