"""The backward kernels, compiled for the main targets: matrix instructions, no spills, no surprise in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from flexgen.lowering.targets import TARGETS
from flexgen.lowering.triton.backward_plan import BackwardPlan
from flexgen.runtime.resources import measure
from tests.goldens.backward_kernels import CASES, BackwardCase, Mods
from tests.goldens.kernels import SIZES, Sizes, causal_mask
from tests.offline.facts import MATRIX_INSTRUCTIONS, assembly

MAIN = ("sm_80", "sm_90", "sm_100", "gfx942")


def kernels(case: BackwardCase, target: str, wanted: Callable[[BackwardPlan], bool] = lambda plan: True):
    """Yield entry, plan and binary of each backward kernel but the one of row statistics."""
    lowered = case.lower(target)
    assert lowered.backward is not None
    plans = {entry: plan for entry, (_, plan) in lowered.backward.passes.items()}
    chosen = {entry: plan for entry, plan in plans.items() if isinstance(plan, BackwardPlan) and wanted(plan)}
    assert chosen, f"none of {', '.join(plans)} is plain Triton"
    for entry, plan in chosen.items():
        yield entry, plan, lowered.binary(entry)


FEW = 160  # bytes a thread; what does not stay in registers beside two sums, a score and what is derived from it


def cases() -> list[object]:
    """Return every pair; those of less interest are slow."""
    pairs = []
    for case in CASES:
        for target in MAIN:
            marks = [] if target == "sm_90" or case.name == "softcap_and_learned_bias" else [pytest.mark.slow]
            pairs.append(pytest.param(case, target, id=f"{case.name}-{target}", marks=marks))
    return pairs


@pytest.mark.parametrize(("case", "target"), cases())
def test_main_target(case: BackwardCase, target: str) -> None:
    for entry, plan, binary in kernels(case, target):
        resources = measure(binary)
        used = [name for name, _ in MATRIX_INSTRUCTIONS.values() if name in assembly(binary)]
        assert used, f"{entry}: no matrix instruction"
        assert resources.shared_bytes <= min(plan.shared_bytes, TARGETS[target].shared_bytes), entry
        assert resources.spill_stores <= (0 if case.name == "causal" else FEW), f"{entry} spills"


# Bytes that a thread spills of dK and dV on Hopper: the tile measured to be the fastest keeps two sums in registers.
KNOWN_SPILLS = {("backward_dkdv", 128): 100, ("backward_dkdv", 256): 320}


@pytest.mark.parametrize("head_dim", [pytest.param(SIZES.D, marks=pytest.mark.slow), 128, 256])  # SIZES: `causal-sm_90`
def test_default_tiles_of_hopper_hardly_spill(head_dim: int) -> None:
    case = BackwardCase(CASES[0].build, Sizes(D=head_dim), options={"bwd_BACKEND": "TRITON"})
    for entry, plan, binary in kernels(case, "sm_90"):
        resources = measure(binary)
        assert resources.spill_stores <= KNOWN_SPILLS.get((entry, head_dim), 0), f"{entry}: {resources}"
        assert resources.shared_bytes <= plan.shared_bytes, entry


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in MAIN if target != "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_tiles_do_not_spill(head_dim: int, target: str) -> None:
    for entry, plan, binary in kernels(BackwardCase(CASES[0].build, Sizes(D=head_dim)), target):
        resources = measure(binary)
        assert resources.spill_stores == 0, f"{entry}: {resources}"
        assert resources.shared_bytes <= plan.shared_bytes, entry


@pytest.mark.parametrize("target", MAIN)
def test_kernels_of_row_statistics_use_no_local_memory(target: str) -> None:
    assert measure(CASES[0].lower(target).binary("backward_delta")).local_memory_instructions == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_deterministic_kernels_compile(target: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = [entry for entry, *_ in kernels(CASES[2], target)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == ["backward_dq_measure", "backward_dq", "backward_dkdv"]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [1024, 1000])
def test_gradients_of_elements_that_pairs_pick(masked: bool, length: int) -> None:
    """Where no condition counts pairs, as on tiles without a mask at lengths of whole tiles, too."""

    def relative_positions() -> Mods:
        table = torch.zeros(2 * length, requires_grad=True)

        def relative(score, b, h, q_idx, kv_idx):
            return score + table[q_idx - kv_idx + length]

        return relative, causal_mask if masked else None

    case = BackwardCase(relative_positions, dataclasses.replace(SIZES, Lq=length, Lk=length))
    scatters = [binary for *_, binary in kernels(case, "sm_90", lambda plan: bool(plan.scatter))]
    assert len(scatters) == 1
    assert any(word in assembly(scatters[0]) for word in ("atom.global", "red.global"))
