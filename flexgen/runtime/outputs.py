"""Allocation of a call's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen.runtime.describe import Launch

Order = tuple[int, int, int]

PLAIN: Order = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Shapes of a call's outputs.

    Attributes:
        shape: [B, Hq, Lq, Dv] of the attention output.
        order: which of batch (0), heads (1) and rows (2) lies outermost in memory, and so on; columns lie innermost.
        columns_outside: the query's columns do not lie innermost; what a kernel wrote is laid out anew, see `as_query`.
        aux_dtype: float32, or float64 for float64 inputs.
        logsumexp, max_scores: which auxiliary outputs, [B, Hq, Lq], are wanted.
        tail: what rounding takes from the logsumexp is wanted too, as "logsumexp_tail"; 0 where a kernel has none.
    """

    shape: tuple[int, int, int, int]
    order: Order
    aux_dtype: torch.dtype
    logsumexp: bool
    max_scores: bool
    tail: bool = False
    columns_outside: bool = False

    @property
    def row_span(self) -> int:
        """One past the largest element offset inside one (batch, head)."""
        _, _, s, d = self.shape
        return max(s - 1, 0) * dense_strides(self.shape, (*self.order, 3))[2] + d

    def allocate(self, query: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return uninitialised outputs on the query's device, `output` in [B, H, L, D] order."""
        b, h, s, _ = self.shape
        if self.order == PLAIN:
            outputs = {"output": query.new_empty(self.shape)}
        else:
            strides = dense_strides(self.shape, (*self.order, 3))
            outputs = {"output": query.new_empty_strided(self.shape, strides)}
        if self.logsumexp:
            outputs["logsumexp"] = query.new_empty((b, h, s), dtype=self.aux_dtype)
        if self.tail:
            outputs["logsumexp_tail"] = query.new_zeros((b, h, s), dtype=self.aux_dtype)
        if self.max_scores:
            outputs["max_scores"] = query.new_empty((b, h, s), dtype=self.aux_dtype)
        return outputs


def output_form(launch: Launch, layout: str, *, logsumexp: bool, max_scores: bool, tail: bool = False) -> OutputForm:
    """Return the form of a launch's outputs; the output keeps the query's order of dimensions in memory."""
    query, value = launch.tensors["query"], launch.tensors["value"]
    *order, innermost = (0, 2, 1, 3) if layout == "bshd" else memory_order(query)
    columns_outside = innermost != 3
    batch, heads, rows = (axis for axis in (*order, innermost) if axis != 3)
    return OutputForm(
        shape=(launch.batch, launch.q_heads, launch.q_len, value.shape[3]),
        order=(batch, heads, rows),
        aux_dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
        logsumexp=logsumexp,
        max_scores=max_scores,
        tail=tail,
        columns_outside=columns_outside,
    )


def memory_order(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Return a tensor's four dimensions from the outermost in memory to the innermost; expanded ones are outermost.

    torch.compile traces it, also with symbols for strides: dimensions are sorted by comparisons alone.
    """
    order: list[int] = []
    for dim in range(4):
        place = len(order)
        while place > 0 and _lies_outside(tensor, dim, order[place - 1]):
            place -= 1
        order.insert(place, dim)
    first, second, third, fourth = order
    return first, second, third, fourth


def _lies_outside(tensor: torch.Tensor, dim: int, other: int) -> bool:
    """Whether `dim`, a later dimension than `other`, lies further out in memory."""
    stride, other_stride = tensor.stride(dim), tensor.stride(other)
    if other_stride == 0:
        return False
    return bool(stride == 0 or stride > other_stride)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions lie in memory in this order, outermost first."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= max(shape[dim], 1)
    return tuple(strides)


def as_query(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the output with its dimensions in the query's order in memory, for a query whose columns lie outside."""
    laid_out = output.new_empty_strided(output.shape, dense_strides(output.shape, memory_order(query)))
    return laid_out.copy_(output)
