"""Problems for Hopper, lowered without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flexgen
from benchmarks.gluon_cases import Check, attention_of, aux_of, checks, table_of, tensors_of
from flexgen.lowered import Lowered

Mod = Callable[..., Any] | None
CHECKS = {check.name: check for check in checks()}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def lowered(check: Check) -> Lowered:
    """Lower a problem that the GPU check runs too."""
    tensors, table = tensors_of(check, "meta"), table_of(check, "cpu")
    return attention_of(check, "cpu").lower(*tensors, return_aux=aux_of(check), target="sm_90", block_table=table)


def lower(
    score_mod: Mod = None,
    mask_mod: Mod = causal,
    options: dict[str, Any] | None = None,
    *,
    head_dim: int = 128,
    lengths: tuple[int, int] = (1024, 1024),
    dtype: torch.dtype = torch.bfloat16,
    target: str = "sm_90",
) -> Lowered:
    """Lower two batches of four heads."""
    query, key = (torch.empty(2, 4, length, head_dim, dtype=dtype, device="meta") for length in lengths)
    return flexgen.compile(score_mod, mask_mod, options).lower(query, key, key, target=target)


def backend_of(low: Lowered) -> str:
    return str(next(decision.value for decision in low.plan.decisions if decision.name == "BACKEND"))


def passed_over(low: Lowered) -> str:
    """Return why another backend serves a call instead."""
    decision = next(decision for decision in low.plan.decisions if decision.name == "BACKEND")
    return "; ".join(rejected.because for rejected in decision.rejected if rejected.value == "GLUON")
