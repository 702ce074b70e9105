"""What the assembler makes of Hopper's backward kernels: products in flight, few spills, no surprise in memory."""

from __future__ import annotations

import pytest

from benchmarks.gluon_backward_check import lowered
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.runtime.resources import measure
from tests.gluon.backward_problems import CHECKS, backward_of

PARKED = 64  # bytes: values that a thread puts aside before its loop; 8 but for dK and dV at head dim 64
BUSY = 320  # where mods or masks are evaluated for each pair
EVERYDAY = ("causal D=64", "causal D=128", "causal D=256", "documents D=128")


@pytest.mark.parametrize("name", EVERYDAY)
def test_kernels(name: str) -> None:
    check_machine_code(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - set(EVERYDAY)))
def test_other_kernels(name: str) -> None:
    check_machine_code(name)


def check_machine_code(name: str) -> None:
    low = lowered(CHECKS[name])
    for entry, (source, plan) in backward_of(low).passes.items():
        if isinstance(plan, GluonBackwardPlan):
            binary = low.binary(entry)
            resources = measure(binary)
            # C7510 to C7519 say that matrix instructions are serialised; nothing else tells.
            assert not resources.warnings, entry
            evaluates = "score_mod(" in source.text or "mask_mod(" in source.text
            spilled = max(resources.spill_stores, resources.spill_loads)
            assert spilled <= (BUSY if evaluates or CHECKS[name].options else PARKED), entry
            assert resources.shared_bytes <= plan.shared_bytes, entry
            assert resources.count("HGMMA") > 0
            assert resources.count("UTMALDG") > 0
            assert "setmaxnreg" in str(binary.stages["ptx"])
