"""What the plans of a module rely on and each call may violate: multiples of lengths, strides, alignment."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.plans import WalkPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton.plan import ForwardPlan

INPUTS = ("query", "key", "value")


def length_multiples(plans: Iterable[WalkPlan]) -> tuple[int, int]:
    """Return what the numbers of queries and of keys are multiples of."""
    pairs = [_multiples(plan) for plan in plans]
    return math.lcm(1, *(q for q, _ in pairs)), math.lcm(1, *(kv for _, kv in pairs))


def _multiples(plan: WalkPlan) -> tuple[int, int]:
    """Return what one kernel's loads, none of them masked, ask of both lengths."""
    match plan:
        case GluonPlan():
            return 1, 1 if plan.KV_TAIL else plan.BLOCK_N
        case GluonBackwardPlan():
            walked = 1 if plan.WALKED_TAIL else plan.BLOCK_N if plan.kernel is BackwardKernel.DQ else plan.BLOCK_M
            return (1, walked) if plan.kernel is BackwardKernel.DQ else (walked, 1)
    return (plan.BLOCK_M, plan.BLOCK_N) if plan.IS_DIVISIBLE else (1, 1)


def unit_strides(plans: Iterable[WalkPlan]) -> list[str]:
    """Return the tensors whose last dimension has to have stride 1."""
    plans = tuple(plans)
    hopper = any(isinstance(plan, GluonPlan | GluonBackwardPlan) for plan in plans)
    strided = [plan.unit_stride for plan in plans if not isinstance(plan, GluonPlan | GluonBackwardPlan)]
    return [name for name in INPUTS if hopper or any(name in names for names in strided)]


def copied(plans: Iterable[WalkPlan]) -> list[str]:
    """Return the tensors that the copy engine reads, whose rows have to begin on 16 bytes each."""
    found: set[str] = set()
    for plan in plans:
        if isinstance(plan, GluonPlan | GluonBackwardPlan):
            found |= set(INPUTS)
        elif isinstance(plan, ForwardPlan) and plan.USE_TMA:
            found |= {"key", "value"}
    return [name for name in INPUTS if name in found]
