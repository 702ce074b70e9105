"""The problems behind tests/golden/plans: each changes one thing about causal attention in bfloat16 on sm_90."""

from __future__ import annotations

import torch

import flexgen
from tests.goldens.kernels import KernelCase, Sizes, blocks, causal_mask, kernel

BASE = "causal_on_sm_90"
OF_TARGETS: dict[str, str] = {}


def plan(target: str = "sm_90", sizes: Sizes = Sizes(), **problem):
    """Turn a builder of (score_mod, mask_mod) into a case, planned for `target`."""

    def register(build) -> KernelCase:
        OF_TARGETS[build.__name__] = target
        return kernel(sizes, **problem)(build)

    return register
