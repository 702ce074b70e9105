"""Allocation of a call's outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.runtime.describe import Launch


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Shapes of a call's outputs.

    Attributes:
        shape: [B, Hq, Lq, Dv] of the attention output.
        heads_inside: memory is [B, Lq, Hq, Dv], following the query; the output is a view of it.
        aux_dtype: float32, or float64 for float64 inputs.
        logsumexp, max_scores: which auxiliary outputs, [B, Hq, Lq], are wanted.
        tail: what rounding takes from the logsumexp is wanted too, as "logsumexp_tail"; 0 where a kernel has none.
    """

    shape: tuple[int, int, int, int]
    heads_inside: bool
    aux_dtype: torch.dtype
    logsumexp: bool
    max_scores: bool
    tail: bool = False

    @property
    def row_span(self) -> int:
        """One past the largest element offset inside one (batch, head)."""
        _, h, s, d = self.shape
        return max(s - 1, 0) * (d * h if self.heads_inside else d) + d

    def allocate(self, query: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return uninitialised outputs on the query's device, `output` in [B, H, L, D] order."""
        b, h, s, d = self.shape
        if self.heads_inside:
            outputs = {"output": query.new_empty((b, s, h, d)).transpose(1, 2)}
        else:
            outputs = {"output": query.new_empty(self.shape)}
        if self.logsumexp:
            outputs["logsumexp"] = query.new_empty((b, h, s), dtype=self.aux_dtype)
        if self.tail:
            outputs["logsumexp_tail"] = query.new_zeros((b, h, s), dtype=self.aux_dtype)
        if self.max_scores:
            outputs["max_scores"] = query.new_empty((b, h, s), dtype=self.aux_dtype)
        return outputs


def output_form(launch: Launch, layout: str, *, logsumexp: bool, max_scores: bool, tail: bool = False) -> OutputForm:
    """Return the form of a launch's outputs; the output keeps the query's order of heads and rows in memory."""
    query, value = launch.tensors["query"], launch.tensors["value"]
    heads, rows = query.stride(1), query.stride(2)
    heads_inside = layout == "bshd" or (launch.q_heads > 1 and launch.q_len > 1 and heads < rows)
    return OutputForm(
        shape=(launch.batch, launch.q_heads, launch.q_len, value.shape[3]),
        heads_inside=heads_inside,
        aux_dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
        logsumexp=logsumexp,
        max_scores=max_scores,
        tail=tail,
    )
