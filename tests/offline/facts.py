"""Facts that hold for the machine code of every kernel, whatever its mods."""

from __future__ import annotations

import torch

from flexgen.lowered import Lowered
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.build import Binary

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
    assert binary.shared_bytes <= plan.shared_bytes <= plan.target.shared_bytes
    instruction = matrix_instruction(plan)
    assert instruction is None or instruction in assembly(binary)
    return binary


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
