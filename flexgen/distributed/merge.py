"""Adds up what kernels return for parts of a chunk's rows: outputs by their sums of exponentials, gradients plainly.

Rows that one part alone has are taken as the kernel wrote them. Only those that several parts have are added up, in
float32: with a window that is its width at a border, and the rest of a long chunk is not even copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.distributed.plan import Span
from flexgen.runtime.outputs import dense_strides, output_order

Part = Mapping[str, Tensor]  # "output" [B, H, n, D]; "logsumexp", perhaps "logsumexp_tail" and "max_scores" [B, H, n]


@dataclass(frozen=True, slots=True)
class Cover:
    """How parts cover rows [0, rows).

    Attributes:
        rows: how many there are.
        shared: the range that rows of several parts span.
        is_whole: every row is in a part.
    """

    rows: int
    shared: Span
    is_whole: bool

    @classmethod
    def of(cls, rows: int, parts: Sequence[Span]) -> Cover:
        """Count the parts of each row; a part may be there twice."""
        ends = sorted({0, rows, *(end for part in parts for end in (part.start, part.stop))})
        between = [Span(start, stop) for start, stop in itertools.pairwise(ends)]
        counts = [sum(part.start <= span.start and span.stop <= part.stop for part in parts) for span in between]
        shared = [span for span, count in zip(between, counts, strict=True) if count > 1]
        hull = Span(shared[0].start, shared[-1].stop) if shared else Span(0, 0)
        return cls(rows, hull, 0 not in counts)

    def in_shared(self, part: Span) -> Span:
        """Return what of a part lies in the shared range; it may be empty."""
        start = max(part.start, self.shared.start)
        return Span(start, max(start, min(part.stop, self.shared.stop)))


class RowSums:
    """A sum of gradients of a chunk's rows.

    Args:
        cover: of all parts that will be added.
        dtype: of sums.
    """

    def __init__(self, cover: Cover, dtype: torch.dtype) -> None:
        self._cover, self._dtype = cover, dtype
        self._apart: list[tuple[Span, Tensor]] = []
        self._sum: Tensor | None = None

    def add(self, start: int, part: Tensor) -> None:
        """Add the gradient [B, H, n, D] of rows from `start` on."""
        rows = Span(start, start + part.shape[2])
        common, shared = self._cover.in_shared(rows), self._cover.shared
        if common.rows < rows.rows:
            self._apart.append((rows, part))
        if not common.rows:
            return
        if self._sum is None:
            self._sum = _room(part, shared.rows, self._dtype).zero_()
        _rows(self._sum, common, shared.start).add_(_rows(part, common, start))

    def total(self, like: Tensor) -> Tensor:
        """Return the sum, in the dtype of `like`, whose batch, heads and columns it has too."""
        return _joined(self._cover, self._apart, self._sum, like, 0.0)


class MergedRows:
    """The results of a chunk's queries, each part weighted by its sum of exponentials.

    Where kernels give the logsumexp in two numbers, float64 holds both.

    Args:
        cover: of all parts that will be added.
    """

    def __init__(self, cover: Cover) -> None:
        self._cover = cover
        self._apart: list[tuple[Span, Part]] = []
        self._merged: dict[str, Tensor] = {}

    def add(self, start: int, outputs: Part) -> None:
        """Add what a kernel returned for rows from `start` on."""
        part = _with_whole_logsumexp(outputs)
        rows = Span(start, start + part["output"].shape[2])
        common, shared = self._cover.in_shared(rows), self._cover.shared
        if common.rows < rows.rows:
            self._apart.append((rows, part))
        if not common.rows:
            return
        if not self._merged:
            self._merged = _nothing(part, shared.rows, outputs["logsumexp"].dtype)
        merged = {name: _rows(tensor, common, shared.start) for name, tensor in self._merged.items()}
        own = {name: _rows(tensor, common, start) for name, tensor in part.items()}
        before = merged["logsumexp"]
        after = torch.logaddexp(before, own["logsumexp"])
        output = merged["output"]
        weight = _weight(own["logsumexp"], after, output)
        output.mul_(_weight(before, after, output)).addcmul_(own["output"], weight)
        before.copy_(after)
        if "max_scores" in merged:
            torch.maximum(merged["max_scores"], own["max_scores"], out=merged["max_scores"])

    def total(self, like: Part) -> dict[str, Tensor]:
        """Return the results, in dtypes, batch, heads and columns of `like`, of which only these matter."""
        totals = {}
        for name, tensor in like.items():
            if name == "logsumexp_tail":
                continue
            apart = [(rows, part[name]) for rows, part in self._apart]
            fill = 0.0 if name == "output" else float("-inf")
            as_whole = tensor.double() if name == "logsumexp" and "logsumexp_tail" in like else tensor
            totals[name] = _joined(self._cover, apart, self._merged.get(name), as_whole, fill)
        if "logsumexp_tail" in like:
            totals |= _in_two(totals["logsumexp"], like["logsumexp"].dtype)
        return totals


def joined(chunks: Sequence[Tensor]) -> Tensor:
    """Return the chunks' rows one behind the other, in the memory order of the first."""
    if len(chunks) == 1:
        return chunks[0]
    first = chunks[0]
    whole = _room(first, sum(chunk.shape[2] for chunk in chunks), first.dtype)
    start = 0
    for chunk in chunks:
        whole[:, :, start : start + chunk.shape[2]].copy_(chunk)
        start += chunk.shape[2]
    return whole


def _joined(
    cover: Cover, apart: Sequence[tuple[Span, Tensor]], shared: Tensor | None, like: Tensor, fill: float
) -> Tensor:
    """Return all rows: those of single parts, those that were added up, and `fill` where there is nothing."""
    whole = next((part for rows, part in apart if rows.rows == cover.rows and part.dtype == like.dtype), None)
    if whole is None:
        whole = _room(apart[0][1] if apart else like, cover.rows, like.dtype)
        if not cover.is_whole:
            whole.fill_(fill)
        for rows, part in apart:
            whole[:, :, rows.start : rows.stop].copy_(part)
    if shared is not None:
        whole[:, :, cover.shared.start : cover.shared.stop].copy_(shared)
    return whole


def _rows(tensor: Tensor, rows: Span, first: int) -> Tensor:
    """Return some rows of a tensor whose first one is `first`."""
    return tensor[:, :, rows.start - first : rows.stop - first]


def _room(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return room for rows, which lie in memory as those of another tensor do, columns innermost."""
    shape = (*like.shape[:2], rows, *like.shape[3:])
    if len(shape) == 3:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, dense_strides(shape, (*output_order(like), 3)), dtype=dtype)


def _with_whole_logsumexp(part: Part) -> Part:
    tail = part.get("logsumexp_tail")
    if tail is None:
        return part
    return {name: tensor for name, tensor in part.items() if name != "logsumexp_tail"} | {
        "logsumexp": part["logsumexp"].double() + tail.double()
    }


def _in_two(logsumexp: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a logsumexp of float64 as a narrower number and what rounding took from it."""
    rounded = logsumexp.to(dtype)
    tail = torch.where(logsumexp.isinf(), 0.0, logsumexp - rounded)
    return {"logsumexp": rounded, "logsumexp_tail": tail.to(dtype)}


def _nothing(part: Part, rows: int, accumulator: torch.dtype) -> dict[str, Tensor]:
    """Return what there is before any key."""
    found = {"output": _room(part["output"], rows, accumulator).zero_()}
    for name in part.keys() - {"output"}:
        found[name] = _room(part[name], rows, part[name].dtype).fill_(float("-inf"))
    return found


def _weight(part: Tensor, total: Tensor, output: Tensor) -> Tensor:
    """Return what an output's rows are multiplied by, in its dtype: 0 where nothing was seen at all."""
    weight = torch.where(total == float("-inf"), 0.0, torch.exp(part - total))
    return weight.unsqueeze(-1).to(output.dtype)
