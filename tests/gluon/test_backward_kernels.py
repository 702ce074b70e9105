"""Hopper backward kernels as text: one concept each, byte for byte, and each one checked on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.gluon_backward_check import lowered
from benchmarks.gluon_verified import code_digest, verified
from flexgen.codegen.source import KernelSource
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from tests.gluon.backward_problems import CHECKS, backward_of

GOLDENS = {
    "hopper_causal": "causal D=128",
    "hopper_a_kernel_for_each_sum": "causal D=256",
    "hopper_softcap": "softcap D=128",
    "hopper_block_mask": "block mask causal D=64",
}


def hopper_passes(name: str) -> dict[str, KernelSource]:
    passes = backward_of(lowered(CHECKS[name])).passes
    return {entry: source for entry, (source, plan) in passes.items() if isinstance(plan, GluonBackwardPlan)}


@pytest.mark.usefixtures("golden_spelling")
@pytest.mark.parametrize("name", GOLDENS)
def test_kernels(name: str, golden: Callable[[str, str], None]) -> None:
    for entry, source in hopper_passes(GOLDENS[name]).items():
        golden(f"kernels/backward/{name}.{entry.removeprefix('backward_')}.py", source.text)


@pytest.mark.usefixtures("golden_spelling")
@pytest.mark.parametrize("name", GOLDENS)
def test_kernels_were_checked_on_a_gpu(name: str) -> None:
    """A changed kernel is run by `python -m benchmarks.gluon_check --backward` and recorded."""
    sources = hopper_passes(GOLDENS[name])
    assert sources
    for source in sources.values():
        entry = verified().get(code_digest(source.text))
        assert entry is not None, "run benchmarks.gluon_check --backward on a Hopper GPU, then again with --record"
        assert {"check", "kernel", "error", "device", "date", "torch", "triton"} <= entry.keys()
        assert entry["error"] < 0.006
