"""Which calls the Hopper backend serves, which template, and what is said where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from flexgen import backends
from flexgen.errors import OptionError
from flexgen.lowering.gluon_hopper.plan import Template
from tests.gluon.problems import backend_of, causal, lower, passed_over

GLUON = {"BACKEND": "GLUON"}


def window(size: int) -> Any:
    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return sliding_window


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_half_precision_on_sm_90_is_served(head_dim: int) -> None:
    assert backend_of(lower(head_dim=head_dim)) == "GLUON"


def test_a_head_dim_of_32_stays_with_plain_triton_until_it_is_measured() -> None:
    low = lower(head_dim=32)
    assert (backend_of(low), passed_over(low)) == ("TRITON", "not measured to win here")


def test_a_score_mod_at_head_dim_64_gets_small_programs() -> None:
    low = lower(lambda score, b, h, q_idx, kv_idx: torch.tanh(score), head_dim=64)
    assert (backend_of(low), low.plan.template) == ("GLUON", Template.ONE_WARPGROUP)


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_other_chips_are_not_served(target: str) -> None:
    low = lower(target=target)
    assert backend_of(low) == "TRITON"
    assert f"{target} has no warpgroup matrix instructions" in passed_over(low)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "multiply half precision"),
    "head dim 20": ({"head_dim": 20}, "outside of 32 to 256"),
    "head dim 36": ({"head_dim": 36}, "not a multiple of 16 bytes"),
    "head dim 512": ({"head_dim": 512}, "outside of 32 to 256"),
    "few queries": ({"lengths": (20, 1024)}, "do not fill a warpgroup"),
    "few keys": ({"lengths": (1024, 20)}, "less than a tile"),
    "subtiling": ({"options": {"USE_SUBTILING": True}}, "USE_SUBTILING selects plain Triton"),
    "warps": ({"options": {"num_warps": 8}}, "a warpgroup has 4 warps"),
    "stages": ({"options": {"num_stages": 6}}, "bytes of shared memory"),
    "tile": ({"options": {"BLOCK_N": 16}}, "none of these kernels'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_falls_back_and_says_why(case: str) -> None:
    problem, reason = REFUSED[case]
    low = lower(**problem)
    assert backend_of(low) == "TRITON"
    assert reason in passed_over(low)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_an_error_where_it_is_forced(case: str) -> None:
    problem, reason = REFUSED[case]
    options = {**problem.get("options", {}), **GLUON}
    with pytest.raises(OptionError, match="BACKEND='GLUON' cannot be honoured") as raised:
        lower(**{**problem, "options": options})
    assert reason in str(raised.value)


def test_strided_and_misaligned_tensors_are_refused() -> None:
    whole = torch.empty(1, 2, 1024, 257, dtype=torch.bfloat16, device="meta")
    attention = flexgen.compile(None, causal)
    for tensor, reason in ((whole[..., ::2][..., :128], "is strided"), (whole[..., :128], "a multiple of 16 bytes")):
        assert reason in passed_over(attention.lower(tensor, tensor, tensor, target="sm_90"))


def test_plain_triton_can_be_forced() -> None:
    low = lower(options={"BACKEND": "TRITON"})
    assert (backend_of(low), passed_over(low)) == ("TRITON", "")


def test_a_triton_without_gluons_names_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_unavailable", lambda: "Triton 9.9 has no warpgroup_mma")
    assert "Triton 9.9 has no warpgroup_mma" in passed_over(lower())


@pytest.mark.parametrize(
    ("head_dim", "mask", "template", "rows", "persistent"),
    [
        (64, None, Template.WARP_SPECIALISED, 192, False),
        (64, window(1024), Template.ONE_WARPGROUP, 64, False),
        (128, None, Template.WARP_SPECIALISED, 128, False),
        (128, window(1024), Template.WARP_SPECIALISED, 128, True),
        (128, window(256), Template.ONE_WARPGROUP, 64, False),
        (256, causal, Template.WARP_SPECIALISED, 128, False),
        (256, window(256), Template.ONE_WARPGROUP, 64, False),
    ],
)
def test_the_template_follows_head_dim_and_row_length(
    head_dim: int, mask: Any, template: Template, rows: int, persistent: bool
) -> None:
    plan = lower(mask_mod=mask, head_dim=head_dim, options=GLUON).plan
    assert (plan.template, plan.BLOCK_M, plan.PERSISTENT) == (template, rows, persistent)
    assert all(decision.because for decision in plan.decisions)


@pytest.mark.parametrize(("group", "rows"), [(64, 64), (128, 128), (256, 128), (192, 64), (8, 128)])
def test_a_tile_has_one_range_where_a_table_gives_the_ranges_of_groups_of_rows(group: int, rows: int) -> None:
    chosen = torch.zeros(64, dtype=torch.int32)

    def up_to_chosen(b, h, q_idx, kv_idx):
        return kv_idx < chosen[q_idx // group]

    for backend in ("GLUON", "TRITON"):
        plan = lower(mask_mod=up_to_chosen, head_dim=256, options={"BACKEND": backend}).plan
        assert (backend, plan.BLOCK_M) == (backend, rows)


def test_few_queries_get_one_warpgroup() -> None:
    assert lower(lengths=(64, 4096)).plan.BLOCK_M == 64


def test_a_persistent_kernel_has_a_program_for_each_multiprocessor() -> None:
    walking, listed = (lower(mask_mod=window(size)).plan for size in (1024, 256))
    assert [plan.programs(1000, 132) for plan in (walking, listed)] == [132, 1000]
    assert walking.programs(100, 132) == 100


def test_shared_memory_of_every_tile_fits_the_chip() -> None:
    for head_dim in (32, 64, 96, 128, 192, 256):
        plan = lower(head_dim=head_dim, options=GLUON).plan
        assert plan.shared_bytes <= plan.target.shared_bytes
