"""Which backwards the Hopper kernels serve, in which tiles, and what is said where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from flexgen.errors import OptionError
from flexgen.lowering.gluon_hopper import choose_backward
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan, Sums
from tests.gluon.backward_problems import CHECKS, GLUON, backends_of, lower, passed_over, plans_of
from tests.gluon.problems import causal


def window(b, h, q, k):
    return (q >= k) & (q - k < 256)


def narrow(b, h, q, k):
    return (q >= k) & (q - k < 64)


def documents(b, h, q, k):
    return q // 300 == k // 300


def test_they_are_the_default_where_they_were_measured_to_win() -> None:
    assert backends_of(lower()) == ["GLUON", "GLUON"]
    for mask_mod in (causal, window, documents):
        assert set(backends_of(lower(head_dim=256, mask_mod=mask_mod))) == {"GLUON"}
    assert "times as fast as plain Triton at head dim 128" in " ".join(lower().explain().split())


@pytest.mark.parametrize(
    "problem", [{"head_dim": 64}, {"mask_mod": window}, {"mask_mod": documents}, {"mask_mod": narrow, "head_dim": 256}]
)
def test_plain_triton_is_the_default_elsewhere(problem: dict[str, Any]) -> None:
    low = lower(**problem)
    assert (backends_of(low), passed_over(low)) == (["TRITON", "TRITON"], "not measured to win here")


def test_one_entry_of_a_table_makes_them_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose_backward.VERIFIED_TO_WIN, 64, choose_backward.Win("1.3", None))
    assert "because: 1.3 times as fast as plain Triton" in " ".join(lower(head_dim=64).explain().split())


def test_the_backward_is_chosen_apart_from_the_forward() -> None:
    low = lower(options={**GLUON, "fwd_BACKEND": "TRITON"})
    assert "gluon" not in low.source["forward"]
    assert backends_of(low) == ["GLUON", "GLUON"]


def test_sums_that_registers_do_not_hold_have_a_kernel_each() -> None:
    assert [plan.sums for plan in plans_of(lower(options=GLUON))] == [Sums.QUERY, Sums.KEY_AND_VALUE]
    wide = lower(options=GLUON, head_dim=256)
    assert [plan.sums for plan in plans_of(wide)] == [Sums.QUERY, Sums.VALUE, Sums.KEY]
    assert {"backward_dq", "backward_dv", "backward_dk"} <= wide.source.keys()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "multiply half precision"),
    "head dim 32": ({"head_dim": 32}, "outside of 33 to 256"),
    "head dim 36": ({"head_dim": 36}, "not a multiple of 16 bytes"),
    "head dim 512": ({"head_dim": 512}, "outside of 33 to 256"),
    "one query": ({"lengths": (1, 1024)}, "at most 1 queries do not fill a warpgroup"),
    "few keys": ({"lengths": (1024, 20)}, "at most 32 keys do not fill a warpgroup"),
    "warps": ({"options": {"bwd_num_warps": 8}}, "a warpgroup has 4 warps"),
    "stages": ({"options": {"bwd_num_stages": 6}}, "bytes of shared memory"),
    "one stage": ({"options": {"bwd_num_stages": 1}, "head_dim": 256}, "the pipeline holds two"),
    "own side": ({"options": {"bwd_BLOCK_N1": 64}}, "none of these kernels'"),
    "walked side": ({"options": {"bwd_BLOCK_M1": 16}}, "none of these kernels'"),
    "subtiling": ({"options": {"bwd_FORCE_USE_FLEX_ATTENTION": True}}, "selects plain Triton"),
    "other chips": ({"target": "sm_100"}, "no warpgroup matrix instructions"),
    "nothing live": ({"mask_mod": lambda b, h, q, k: k < 0}, "no pair is ever live"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_falls_back_and_says_why(case: str) -> None:
    problem, reason = REFUSED[case]
    low = lower(**problem)
    assert set(backends_of(low)) == {"TRITON"}
    assert reason in passed_over(low)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_an_error_where_it_is_forced(case: str) -> None:
    problem, reason = REFUSED[case]
    options = {**problem.get("options", {}), **GLUON}
    with pytest.raises(OptionError, match="BACKEND='GLUON' cannot be honoured") as raised:
        lower(**{**problem, "options": options})
    assert reason in str(raised.value)


def test_gradients_of_captured_tensors_leave_the_whole_backward_to_plain_triton() -> None:
    bias = torch.zeros(4, requires_grad=True)

    def learned(score, b, h, q_idx, kv_idx):
        return score + bias[h]

    low = lower(learned)
    assert set(backends_of(low)) == {"TRITON"}
    assert "it adds to the gradient of bias" in passed_over(low)


def test_strided_and_misaligned_tensors_are_refused() -> None:
    whole = torch.empty(1, 2, 1024, 257, dtype=torch.bfloat16, device="meta", requires_grad=True)
    attention = flexgen.compile(None, causal)
    for tensor, reason in ((whole[..., ::2][..., :128], "is strided"), (whole[..., :128], "a multiple of 16 bytes")):
        assert reason in passed_over(attention.lower(tensor, tensor, tensor, target="sm_90"))


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_tiles_fit_the_chip_and_every_decision_has_a_reason(name: str) -> None:
    from benchmarks.gluon_backward_check import lowered

    for plan in plans_of(lowered(CHECKS[name])):
        assert isinstance(plan, GluonBackwardPlan)
        assert plan.shared_bytes <= plan.target.shared_bytes
        assert all(decision.because for decision in plan.decisions)


def test_a_walked_tile_may_be_chosen() -> None:
    dq, dkdv = plans_of(lower(options={**GLUON, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 128}))
    assert (dq.BLOCK_M, dq.BLOCK_N, dkdv.BLOCK_M, dkdv.BLOCK_N) == (128, 128, 32, 128)
    assert (dq.PIPELINED, dkdv.PIPELINED) == (False, True)


def test_rows_are_prepared_in_the_form_that_the_kernels_read() -> None:
    source = lower(options=GLUON).source["backward_delta"]
    assert "logsumexp * LOG2_E" in source
    assert "ROW_MULTIPLE = tl.constexpr(128)" in source
    assert "ROW_MULTIPLE" not in lower(head_dim=64).source["backward_delta"]
