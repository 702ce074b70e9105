"""The problems behind tests/golden/plans: each changes one thing about causal attention in bfloat16 on sm_90."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.lowered import Lowered
from tests.goldens.kernels import KernelCase, Sizes, blocks, causal_mask, kernel


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A kernel that is planned for one target, and not emitted for a golden of its own."""

    case: KernelCase
    target: str

    @property
    def name(self) -> str:
        return self.case.name

    def lower(self) -> Lowered:
        return self.case.lower(self.target)


def plan(target: str = "sm_90", **problem: Any) -> Callable[[Callable[[], Any]], PlanCase]:
    """Turn a builder of (score_mod, mask_mod) into the case named after it; `problem` as for `kernel`."""
    return lambda build: PlanCase(kernel(**problem)(build), target)


@plan()
def causal_on_sm_90():
    return None, causal_mask


# Targets.


@plan("sm_80")
def on_sm_80():
    return None, causal_mask


@plan("sm_100")
def on_sm_100():
    return None, causal_mask


@plan("sm_120")
def on_sm_120():
    return None, causal_mask


@plan("gfx942")
def on_gfx942():
    return None, causal_mask


# Dtypes and sizes.


@plan(sizes=Sizes(dtype=torch.float32))
def float32_needs_smaller_tiles():
    return None, causal_mask


@plan(sizes=Sizes(D=256))
def head_dim_of_256():
    return None, causal_mask


@plan("gfx942", sizes=Sizes(D=512))
def large_head_dim_rejects_tiles():
    return None, causal_mask


@plan(sizes=Sizes(D=192, Dv=128))
def different_head_dims():
    return None, causal_mask


@plan(sizes=Sizes(Lq=1000, Lk=1000, D=80))
def uneven_lengths_and_padded_head_dim():
    return None, causal_mask


@plan(sizes=Sizes(Lq=40, Lk=24))
def short_lengths_shrink_the_tile():
    return None, causal_mask


@plan(sizes=Sizes(Hq=16, Hkv=2, Lq=1, Lk=4096))
def decode_packs_the_heads_of_a_group():
    return None, None


@plan(sizes=Sizes(Hq=16, Hkv=2))
def prefill_does_not_pack():
    return None, causal_mask


# Block tables.


@plan(make_table=blocks(128, 128))
def block_table():
    return None, causal_mask


@plan(make_table=blocks(48, 96))
def block_table_whose_blocks_bound_the_tile():
    return None, causal_mask


# Mods.


@plan()
def empty_rows_are_not_safe():
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx > 3)

    return None, mask


@plan()
def softcap_takes_the_fast_tanh():
    def score_mod(score, b, h, q_idx, kv_idx):
        return 20.0 * torch.tanh(score / 20.0)

    return score_mod, causal_mask


@plan()
def lowest_finite_score_is_subtracted_first():
    lowest = torch.finfo(torch.float32).min

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, lowest)

    return score_mod, causal_mask


@plan()
def captured_table_takes_shared_memory():
    bias = torch.zeros(1024, 1024)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx, kv_idx]

    return score_mod, causal_mask


# Options.


@plan(options={"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2})
def forced_tile():
    return None, causal_mask


@plan(options={"USE_TMA": True, "USE_SUBTILING": True, "PRESCALE_QK": True})
def forced_variants():
    return None, causal_mask


@plan(options={"ROWS_GUARANTEED_SAFE": True})
def unproved_promise_is_made_harmless():
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx > 3)

    return None, mask


@plan("gfx942", options={"kpack": 2, "waves_per_eu": 2})
def options_of_amd():
    return None, causal_mask


CASES: tuple[PlanCase, ...] = tuple(value for value in list(vars().values()) if isinstance(value, PlanCase))


# Refused: the golden is the error.


@plan(options={"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 5}, sizes=Sizes(D=256))
def forced_stages_do_not_fit():
    return None, causal_mask


@plan("sm_80", options={"USE_TMA": True})
def no_bulk_copies_before_sm_90():
    return None, causal_mask


@plan(options={"USE_TMA": True}, sizes=Sizes(D=20))
def bulk_copies_need_aligned_rows():
    return None, causal_mask


@plan(options={"BLOCK_M": 64}, make_table=blocks(48, 96))
def tile_does_not_divide_the_blocks():
    return None, causal_mask


@plan("gfx942", options={"FAST_TANH": True})
def fast_tanh_needs_its_instruction():
    return None, causal_mask


@plan(sizes=Sizes(D=640))
def head_dim_past_the_limit():
    return None, causal_mask


@plan(sizes=Sizes(dtype=torch.float64))
def float64_is_for_the_interpreter():
    return None, causal_mask


REFUSED: tuple[PlanCase, ...] = tuple(
    value for value in list(vars().values()) if isinstance(value, PlanCase) and value not in CASES
)
