"""The kernels of the goldens, compiled for the main targets: matrix instructions, no spills, no surprise in memory."""

from __future__ import annotations

import pytest
import torch
import triton

from flexgen.lowering.targets import TARGETS
from flexgen.runtime.resources import measure
from tests.goldens.kernels import CASES, KernelCase
from tests.offline.facts import compile_table, compiled

MAIN = ("sm_80", "sm_90", "sm_100", "gfx942")
# Bytes: Triton 3.6's assembler parks a register or two even where it uses 80 of 255, and 3.9's up to ten at 255.
PARKED = 40 if triton.__version__.startswith("3.9") else 8
# A kernel of each template, for every main target every day. The others differ from one of these in their masks,
# scores, sizes or outputs, or combine two of them: two of the targets compile those every day.
EACH_TEMPLATE = frozenset(
    {
        "causal",
        "block_table",
        "derived_block_table",
        "evaluated_block_table",
        "softcap",
        "packed_heads_of_a_decode",
        "float32",
        "packed_sequences",
        "dropout",
        "bulk_copies",
        "subtiling",
        "decode",
        "decode_of_small_pages_in_float8",
        "prefill_of_pages",
        "prefill_of_float8",
        "prefill_up_to_kv_lengths",
    }
)
EVERYDAY = ("sm_80", "sm_90")
OTHERS = ("sm_86", "sm_89", "sm_120", "gfx90a", "gfx950")


def runs_on(case: KernelCase, target: str) -> bool:
    return TARGETS[target].has_tma or "USE_TMA" not in case.options


def cases(*targets: str) -> list[object]:
    params = []
    for case in CASES:
        for target in targets:
            if runs_on(case, target):
                everyday = target not in MAIN or target in EVERYDAY or case.name in EACH_TEMPLATE
                marks = () if everyday else (pytest.mark.slow,)
                params.append(pytest.param(case, target, id=f"{case.name}-{target}", marks=marks))
    return params


def test_each_template_is_compiled_for_every_main_target() -> None:
    assert {case.name for case in CASES} >= EACH_TEMPLATE


@pytest.mark.parametrize(("case", "target"), cases(*MAIN))
def test_main_target(case: KernelCase, target: str) -> None:
    check(case, target)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), cases(*OTHERS))
def test_other_target(case: KernelCase, target: str) -> None:
    check(case, target)


def check(case: KernelCase, target: str) -> None:
    lowered = case.lower(target)
    binaries = [compiled(lowered)]
    if lowered.forward.source.second is not None:
        binaries.append(lowered.binary(lowered.forward.source.second.entry))
    for resources in map(measure, binaries):
        if case.sizes.dtype != torch.float32:
            assert max(resources.spill_stores, resources.spill_loads, resources.stack_bytes) <= PARKED


@pytest.mark.parametrize("target", MAIN)
def test_kernels_of_a_derived_table_use_no_local_memory(target: str) -> None:
    binaries = compile_table(kernel_named("derived_block_table").lower(target))
    assert len(binaries) == 4
    assert all(measure(binary).local_memory_instructions == 0 for binary in binaries)


def test_bulk_copies_use_the_copy_engine() -> None:
    assert measure(compiled(kernel_named("bulk_copies").lower("sm_90"))).count("UTMALDG") > 0


def test_softcap_uses_the_tanh_instruction() -> None:
    assert measure(compiled(kernel_named("softcap").lower("sm_90"))).count("MUFU.TANH") > 0


def kernel_named(name: str) -> KernelCase:
    return next(case for case in CASES if case.name == name)
