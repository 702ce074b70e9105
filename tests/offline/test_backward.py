"""The backward kernels, compiled for the main targets: matrix instructions, no spills, no surprise in memory."""

from __future__ import annotations

import pytest

from flexgen.lowering.targets import TARGETS
from flexgen.lowering.triton.backward_plan import BackwardPlan
from flexgen.runtime.resources import measure
from tests.goldens.backward_kernels import CASES, BackwardCase
from tests.goldens.kernels import Sizes
from tests.offline.facts import MATRIX_INSTRUCTIONS, assembly

MAIN = ("sm_80", "sm_90", "sm_100", "gfx942")


def kernels(case: BackwardCase, target: str):
    """Yield plan, binary and resources of each backward kernel but the one of row statistics."""
    lowered = case.lower(target)
    assert lowered.backward is not None
    for entry, (_, plan) in lowered.backward.passes.items():
        if isinstance(plan, BackwardPlan):
            binary = lowered.binary(entry)
            yield entry, plan, binary, measure(binary)


@pytest.mark.parametrize("target", MAIN)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_main_target(case: BackwardCase, target: str) -> None:
    for entry, plan, binary, resources in kernels(case, target):
        used = [name for name, _ in MATRIX_INSTRUCTIONS.values() if name in assembly(binary)]
        assert used, f"{entry}: no matrix instruction"
        assert resources.shared_bytes <= min(plan.shared_bytes, TARGETS[target].shared_bytes), entry
        assert resources.spill_stores == resources.spill_loads == 0, f"{entry} spills"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_tiles_of_hopper_do_not_spill(head_dim: int) -> None:
    for entry, plan, _, resources in kernels(BackwardCase(CASES[0].build, Sizes(D=head_dim)), "sm_90"):
        assert resources.spill_stores == 0, f"{entry} at {plan.BLOCK_M} x {plan.BLOCK_N}"
        assert resources.shared_bytes <= plan.shared_bytes, entry


@pytest.mark.parametrize("target", MAIN)
def test_kernels_of_row_statistics_use_no_local_memory(target: str) -> None:
    assert measure(CASES[0].lower(target).binary("backward_delta")).local_memory_instructions == 0
