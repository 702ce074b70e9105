"""What the assembler makes of Hopper kernels: matrix instructions in flight, no spills, no surprise in memory."""

from __future__ import annotations

import pytest

from flexgen.lowering.gluon_hopper.plan import Template
from flexgen.runtime.resources import measure
from tests.gluon.bounds import SPILLS
from tests.gluon.problems import CHECKS, lowered

EVERYDAY = (
    "none D=64",
    "causal rows=128 D=128",
    "window 1024 D=256",
    "window 100 D=64",
    "softcap rows=64 D=128",
    "two windows D=128",
    "documents D=256",
    "block mask 128x128 causal",
    "document starts",
)


@pytest.mark.parametrize("name", EVERYDAY)
def test_kernel(name: str) -> None:
    check_machine_code(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - set(EVERYDAY)))
def test_other_kernel(name: str) -> None:
    check_machine_code(name)


def check_machine_code(name: str) -> None:
    low = lowered(CHECKS[name])
    binary = low.binary()
    resources = measure(binary)
    # C7510 to C7519 say that matrix instructions are serialised; nothing else tells.
    assert not resources.warnings
    spilled = max(resources.spill_stores, resources.spill_loads)
    assert spilled <= (SPILLS.crowded if low.plan.CONSUMERS == 3 else SPILLS.forward)
    assert resources.shared_bytes <= low.plan.shared_bytes
    assert resources.count("HGMMA") > 0
    assert resources.count("UTMALDG") > 0
    shares = "setmaxnreg" in str(binary.stages["ptx"])
    assert shares == (low.plan.template is Template.WARP_SPECIALISED)
