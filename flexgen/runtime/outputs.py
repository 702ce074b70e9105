"""Allocation of a call's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen.runtime.describe import Launch, surely

Order = tuple[int, int, int]

PLAIN: Order = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Shapes of a call's outputs.

    Attributes:
        shape: [B, Hq, Lq, Dv] of the attention output.
        order: which of batch (0), heads (1) and rows (2) lies outermost in memory, and so on; columns lie innermost.
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
    """Return the form of a launch's outputs; see `output_order` for how the output lies in memory."""
    query, value = launch.tensors["query"], launch.tensors["value"]
    return OutputForm(
        shape=(launch.batch, launch.q_heads, launch.q_len, value.shape[3]),
        order=(0, 2, 1) if layout == "bshd" else output_order(query),
        aux_dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
        logsumexp=logsumexp,
        max_scores=max_scores,
        tail=tail,
    )


def output_order(query: torch.Tensor) -> Order:
    """Return which of batch (0), heads (1) and rows (2) of an output lies outermost in memory, and so on.

    It is the query's order, but that columns lie innermost, as in torch's flex_attention: kernels write them so.
    """
    first, second, third = [dim for dim in memory_order(query) if dim != 3]
    return first, second, third


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
    if surely(other_stride == 0):
        return False
    return surely(stride == 0) or surely(stride > other_stride)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions lie in memory in this order, outermost first."""
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = stride
        size = shape[dim]
        stride *= max(size, 1) if isinstance(size, int) else torch.sym_max(size, 1)
    return tuple(strides)
