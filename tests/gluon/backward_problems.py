"""Backward problems for Hopper, lowered without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flexgen
from benchmarks.gluon_backward_check import backward_checks
from flexgen.lowered import Lowered, LoweredBackward
from tests.gluon.problems import causal

CHECKS = {check.name.removeprefix("backward: "): check for check in backward_checks()}
GLUON = {"bwd_BACKEND": "GLUON"}


def lower(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = causal,
    options: dict[str, Any] | None = None,
    *,
    head_dim: int = 128,
    lengths: tuple[int, int] = (1024, 1024),
    dtype: torch.dtype = torch.bfloat16,
    target: str = "sm_90",
) -> Lowered:
    """Lower two batches of four heads, all of whose inputs get gradients."""
    query, key = (torch.empty(2, 4, length, head_dim, dtype=dtype, device="meta") for length in lengths)
    tensors = (query, key, torch.empty_like(key))
    for tensor in tensors:
        tensor.requires_grad_()
    return flexgen.compile(score_mod, mask_mod, options).lower(*tensors, target=target)


def backward_of(low: Lowered) -> LoweredBackward:
    assert low.backward is not None
    return low.backward


def plans_of(low: Lowered) -> list[Any]:
    return [plan for _, plan in backward_of(low).kernels.passes]


def backends_of(low: Lowered) -> list[str]:
    return [str(_backend(plan).value) for plan in plans_of(low)]


def passed_over(low: Lowered) -> str:
    """Return why plain Triton serves a backward instead."""
    return "; ".join(rejected.because for rejected in _backend(plans_of(low)[0]).rejected)


def _backend(plan: Any) -> Any:
    return next(decision for decision in plan.decisions if decision.name == "BACKEND")
