"""What the assembler makes of Hopper's backward kernels: products in flight, few spills, no surprise in memory."""

from __future__ import annotations

import pytest

from benchmarks.gluon_backward_check import lowered
from flexgen.codegen.source import KernelSource, Role
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.runtime.resources import measure
from tests.gluon.backward_problems import CHECKS, backward_of
from tests.gluon.bounds import SPILLS

EVERYDAY = ("causal D=64", "causal D=128", "causal D=256", "documents D=128")


@pytest.mark.parametrize("name", EVERYDAY)
def test_kernels(name: str) -> None:
    check_machine_code(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - set(EVERYDAY)))
def test_other_kernels(name: str) -> None:
    check_machine_code(name)


def allowed(name: str, source: KernelSource) -> int:
    """Return how many bytes a thread of a kernel may spill."""
    scores = "score_mod(" in source.text
    if scores and any(arg.role is Role.BUFFER for arg in source.args):
        return SPILLS.reading
    return SPILLS.busy if scores or "mask_mod(" in source.text or CHECKS[name].options else SPILLS.backward


def check_machine_code(name: str) -> None:
    low = lowered(CHECKS[name])
    for entry, (source, plan) in backward_of(low).passes.items():
        if isinstance(plan, GluonBackwardPlan):
            binary = low.binary(entry)
            resources = measure(binary)
            # C7510 to C7519 say that matrix instructions are serialised; nothing else tells.
            assert not resources.warnings, entry
            spilled = max(resources.spill_stores, resources.spill_loads)
            assert spilled <= allowed(name, source), entry
            assert resources.shared_bytes <= plan.shared_bytes, entry
            assert resources.count("HGMMA") > 0
            assert resources.count("UTMALDG") > 0
            assert "setmaxnreg" in str(binary.stages["ptx"])
