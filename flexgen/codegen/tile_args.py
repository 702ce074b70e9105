"""Arguments and options that every kernel over tiles of scores shares."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from flexgen.codegen.source import Arg, Role


class TilePlan(Protocol):
    """What of a plan decides them."""

    @property
    def query_dtype(self) -> torch.dtype: ...
    @property
    def accumulator_dtype(self) -> torch.dtype: ...
    @property
    def FLOAT32_PRECISION(self) -> str: ...
    @property
    def wide(self) -> frozenset[str]: ...


def dot_options(plan: TilePlan) -> str:
    """Return what tl.dot takes besides its operands."""
    if plan.query_dtype not in (torch.float32, torch.float64):
        return ""
    out = ", out_dtype=tl.float64" if plan.accumulator_dtype == torch.float64 else ""
    return f', input_precision="{plan.FLOAT32_PRECISION}"' + out


def stride_args(tensor: str, axis: str, plan: TilePlan, unit_stride: Collection[str], outer: str = "b") -> list[Arg]:
    """Return a tensor's strides along batch, head and `axis`, and along the head dim where it is not 1.

    Args:
        outer: the name of the first dimension, the batch unless keys lie in pages.
    """
    width = "i64" if tensor in plan.wide else "i32"
    kinds = {outer: (0, "i64"), "h": (1, "i64"), axis: (2, width)}
    if tensor not in unit_stride:
        kinds["d"] = (3, width)
    return [
        Arg(f"{tensor}_stride_{name}", Role.TENSOR_STRIDE, tensor, dim, kind, True)
        for name, (dim, kind) in kinds.items()
    ]
