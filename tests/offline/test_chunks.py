"""Kernels of chunks of a sequence, whose indices begin at numbers that a call brings, compiled for GPUs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import flexgen
from flexgen.distributed.offsets import ShiftedMods
from flexgen.runtime.resources import measure
from tests.offline.facts import MATRIX_INSTRUCTIONS, assembly
from tests.torch.context_cases import CASES, Case, compile_case

STARTS = {"together": (8192, 8192), "apart": (8192, 4096)}


def lowered(case: Case, starts: tuple[int, int], target: str) -> tuple[flexgen.Lowered, flexgen.Lowered]:
    """Return the lowered kernels of the whole, and those of a chunk."""
    attention, _ = compile_case(case)
    query = torch.empty(1, 2, 4096, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    whole = attention.read(query, query, query)
    chunk = ShiftedMods.of(whole.captured).reading(whole, *starts)
    found = attention.lower(query, query, query, target=target)
    with mock.patch.object(attention, "read", return_value=chunk):
        return found, attention.lower(query, query, query, target=target)


@pytest.mark.parametrize("target", ["sm_90", *[pytest.param(t, marks=pytest.mark.slow) for t in ("sm_80", "gfx942")]])
def test_kernels_of_chunks_compile_as_those_of_the_whole(target: str) -> None:
    whole, chunk = lowered(CASES["causal"], STARTS["apart"], target)
    assert chunk.entries == whole.entries
    for entry in chunk.entries:
        binary = chunk.binary(entry)
        assert measure(binary).spill_stores == 0, entry
        used = [name for name, _ in MATRIX_INSTRUCTIONS.values() if name in assembly(binary)]
        assert used or entry == "backward_delta", f"{entry}: no matrix instruction"


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_chunks_that_begin_together_are_planned_as_the_whole(name: str, target: str) -> None:
    whole, chunk = lowered(CASES[name], STARTS["together"], target)
    assert [(d.name, d.value) for d in chunk.plan.decisions] == [(d.name, d.value) for d in whole.plan.decisions]
    assert chunk.backward is not None and whole.backward is not None
    ours, theirs = (
        {entry: type(plan) for entry, (_, plan) in found.backward.passes.items()} for found in (chunk, whole)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "soft cap, learned bias"])
def test_kernels_that_read_captured_tensors_compile(name: str) -> None:
    _, chunk = lowered(CASES[name], STARTS["apart"], "sm_90")
    for entry in chunk.entries:
        assert measure(chunk.binary(entry)).registers > 0
