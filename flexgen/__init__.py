"""flexgen: compiles attention written as two PyTorch callables into fused kernels that a person can read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexgen.api import Attention, AuxOutput, AuxRequest, Lowered, compile, flex_attention
    from flexgen.block_mask import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
    from flexgen.distributed.context_parallel import ContextParallel, context_parallel
    from flexgen.distributed.plan import ContextPlan
    from flexgen.distributed.planning import plan_context_parallel
    from flexgen.errors import (
        CaptureError,
        FlexgenError,
        InternalError,
        KernelCompileError,
        ModPicklingError,
        NoFeasiblePlanError,
        OptionError,
        ProblemTypeError,
        UnsupportedOpError,
        UnsupportedProblemError,
    )
    from flexgen.options import KernelOptions, Options
    from flexgen.patch import patch_torch

__version__ = "0.1.0"

# Public name -> module that defines it. Loaded on first use, so that importing flexgen costs next to nothing.
_HOMES = {
    **dict.fromkeys(("Attention", "AuxOutput", "AuxRequest", "Lowered", "compile", "flex_attention"), "flexgen.api"),
    **dict.fromkeys(
        ("BlockMask", "and_masks", "create_block_mask", "create_mask", "noop_mask", "or_masks"), "flexgen.block_mask"
    ),
    **dict.fromkeys(
        (
            "CaptureError",
            "FlexgenError",
            "InternalError",
            "KernelCompileError",
            "ModPicklingError",
            "NoFeasiblePlanError",
            "OptionError",
            "ProblemTypeError",
            "UnsupportedOpError",
            "UnsupportedProblemError",
        ),
        "flexgen.errors",
    ),
    **dict.fromkeys(("ContextParallel", "context_parallel"), "flexgen.distributed.context_parallel"),
    "ContextPlan": "flexgen.distributed.plan",
    "plan_context_parallel": "flexgen.distributed.planning",
    **dict.fromkeys(("KernelOptions", "Options"), "flexgen.options"),
    "patch_torch": "flexgen.patch",
}

__all__ = [
    "Attention",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "CaptureError",
    "ContextParallel",
    "ContextPlan",
    "FlexgenError",
    "InternalError",
    "KernelCompileError",
    "KernelOptions",
    "Lowered",
    "ModPicklingError",
    "NoFeasiblePlanError",
    "OptionError",
    "Options",
    "ProblemTypeError",
    "UnsupportedOpError",
    "UnsupportedProblemError",
    "and_masks",
    "compile",
    "context_parallel",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
    "patch_torch",
    "plan_context_parallel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flexgen' has no attribute {name!r}")
    with import_module("flexgen.collector").collector_paused():
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
