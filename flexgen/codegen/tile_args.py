"""Arguments and options that every kernel over tiles of scores shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import torch

from flexgen.codegen.dialects.triton import pointer_type
from flexgen.codegen.source import Arg, Role
from flexgen.lowering.index_map import IndexMap


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
    @property
    def index_map(self) -> IndexMap: ...


def length_args(plan: TilePlan, names: Iterable[str]) -> Iterator[Arg]:
    """Yield lengths and counts that a kernel takes by name, and where packed sequences begin."""
    dtype = plan.index_map.cu_seqlens
    if dtype is not None:
        offsets = ("cu_seqlens_q", "cu_seqlens_k")
        yield from (Arg(f"{name}_ptr", Role.CU_SEQLENS, name, None, pointer_type(dtype), False) for name in offsets)
    yield from (Arg(name, Role.LENGTH, name, None, "i32", False) for name in names)


def dot_options(plan: TilePlan) -> str:
    """Return what tl.dot takes besides its operands."""
    if plan.query_dtype not in (torch.float32, torch.float64):
        return ""
    out = ", out_dtype=tl.float64" if plan.accumulator_dtype == torch.float64 else ""
    return f', input_precision="{plan.FLOAT32_PRECISION}"' + out


def stride_args(tensor: str, axis: str, plan: TilePlan, unit_stride: Collection[str], outer: str = "b") -> list[Arg]:
    """Return a tensor's strides along batch, head and `axis`, and along the head dim where it is not 1.

    Packed sequences are one entry of the batch.

    Args:
        outer: the name of the first dimension, the batch unless keys lie in pages.
    """
    width = "i64" if tensor in plan.wide else "i32"
    kinds = {} if plan.index_map.packs_sequences else {outer: (0, "i64")}
    kinds |= {"h": (1, "i64"), axis: (2, width)}
    if tensor not in unit_stride:
        kinds["d"] = (3, width)
    return [
        Arg(f"{tensor}_stride_{name}", Role.TENSOR_STRIDE, tensor, dim, kind, True)
        for name, (dim, kind) in kinds.items()
    ]
