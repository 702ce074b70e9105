"""Whole backward kernels and the gradients they compute, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.goldens.backward_kernels import CASES, BackwardCase


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backward_kernels(case: BackwardCase, golden: Callable[[str, str], None]) -> None:
    lowered = case.lower("sm_90")
    assert lowered.backward is not None
    for entry, (source, _) in lowered.backward.passes.items():
        golden(f"kernels/backward/{case.name}.{entry.removeprefix('backward_')}.py", source.text)
    stages = dict(lowered.stages)
    if "03_score_grad.ir" in stages:
        golden(f"kernels/backward/{case.name}.ir", stages["03_score_grad.ir"])


def case_named(name: str) -> BackwardCase:
    return next(case for case in CASES if case.name == name)


def test_values_alone_need_one_kernel_without_gradients_of_scores() -> None:
    source = case_named("values_alone").lower("sm_90").source
    assert set(source) == {"forward", "backward_delta", "backward_dkdv"}
    for word in ("value_ptr,", "grad_key", "grad_weight", "grad_score", "delta"):
        assert word not in source["backward_dkdv"].replace("grad_value_ptr,", "")


@pytest.mark.parametrize(
    ("wanted", "kernels"), [(("query",), {"backward_dq"}), (("key",), {"backward_dkdv"}), ((), {"backward_dkdv"})]
)
def test_only_the_kernels_of_wanted_gradients_are_compiled(wanted: tuple[str, ...], kernels: set[str]) -> None:
    """The learned bias is one of keys, so that it needs the kernel of keys whatever else is wanted."""
    case = case_named("softcap_and_learned_bias")
    lowered = BackwardCase(case.build, case.sizes, wanted).lower("sm_90")
    source = lowered.source
    assert set(source) == {"forward", "backward_delta", "backward_dkdv", *kernels}
    writes = {
        name for name in ("grad_query", "grad_key", "grad_value") if any(f"{name}_ptr" in t for t in source.values())
    }
    assert writes == {f"grad_{name}" for name in wanted}


def test_captured_gradients_alone_need_no_product_with_keys() -> None:
    case = case_named("learned_relative_positions")
    source = BackwardCase(case.build, case.sizes, ()).lower("sm_90").source
    assert set(source) == {"forward", "backward_delta", "backward_dq"}
    assert "grad_query" not in source["backward_dq"]
    assert "atomic_add" in source["backward_dq"]


@pytest.mark.parametrize(("write_dq", "kernel"), [(None, "dq"), (True, "dq"), (False, "dkdv")])
def test_write_dq_chooses_where_pairs_are_scattered(write_dq: bool | None, kernel: str) -> None:
    case = case_named("learned_relative_positions")
    options = {} if write_dq is None else {"WRITE_DQ": write_dq}
    source = BackwardCase(case.build, case.sizes, options=options).lower("sm_90").source
    assert [name for name in ("dq", "dkdv") if "atomic_add" in source[f"backward_{name}"]] == [kernel]


def test_deterministic_mode_sums_integers() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        source = case_named("learned_relative_positions").lower("sm_90").source
    finally:
        torch.use_deterministic_algorithms(False)
    assert "atomic_max" in source["backward_dq_measure"]
    assert "to(tl.int64)" in source["backward_dq"]


def test_nothing_is_lowered_for_tensors_without_gradients() -> None:
    assert BackwardCase(case_named("causal").build, wanted=()).lower("sm_90").backward is None
