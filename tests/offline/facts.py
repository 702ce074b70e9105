"""Facts that hold for the machine code of every kernel, whatever its mods."""

from __future__ import annotations

import torch

from flexgen.lowered import Lowered
from flexgen.lowering.facts import Tier
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.build import Binary, compile_entry
from flexgen.runtime.load import module_of

# The matrix instruction of a target in its assembly, and the rows of a tile from which Triton uses it.
MATRIX_INSTRUCTIONS = {
    "mma": ("mma.sync", 16),
    "wgmma": ("wgmma.mma_async", 64),
    "tcgen05": ("tcgen05.mma", 64),
    "mfma": ("v_mfma", 16),
}


def compiled(lowered: Lowered) -> Binary:
    """Compile for the plan's target, and check what holds for every kernel."""
    binary = lowered.binary()
    plan = lowered.plan
    assert binary.shared_bytes <= plan.shared_bytes, f"{tile_text(plan)}: the plan's bound is too low"
    assert plan.shared_bytes <= plan.target.shared_bytes
    instruction = matrix_instruction(plan)
    if instruction and lowered.understood.facts.tier is not Tier.ALL_FALSE:
        assert instruction in assembly(binary), f"{tile_text(plan)}: no {instruction}"
    return binary


def compile_table(lowered: Lowered) -> list[Binary]:
    """Compile the kernels that derive the block table; none where the forward kernel walks no derived table."""
    if lowered.table is None:
        return []
    source, plan = lowered.table.source, lowered.table.plan
    entries = (*source.summaries.values(), source.count, source.fill)
    return [
        compile_entry(module_of(entry), entry.entry, entry.args, plan.target, num_warps=plan.num_warps, num_stages=1)
        for entry in entries
    ]


def tile_text(plan: ForwardPlan) -> str:
    return f"BLOCK_M={plan.BLOCK_M} BLOCK_N={plan.BLOCK_N} num_warps={plan.num_warps} num_stages={plan.num_stages}"


def matrix_instruction(plan: ForwardPlan) -> str | None:
    """Return the matrix instruction that the products of a plan's tile must use; None where there may be none."""
    if plan.query_dtype == torch.float32:
        return None
    instruction, rows = MATRIX_INSTRUCTIONS[plan.target.matrix_unit]
    return instruction if rows <= plan.BLOCK_M else small_tile_instruction(plan.target)


def small_tile_instruction(target: Target) -> str:
    return MATRIX_INSTRUCTIONS["mma" if target.backend == "cuda" else target.matrix_unit][0]


def assembly(binary: Binary) -> str:
    text = binary.stages["ptx" if binary.backend == "cuda" else "amdgcn"]
    assert isinstance(text, str)
    return text
