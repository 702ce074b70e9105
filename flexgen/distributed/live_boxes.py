"""Which rows of a chunk of queries see which rows of a chunk of keys, for all pairs of chunks at once.

The bounds that the analysis proved for a tile of a kernel hold for a chunk as well, which is a large tile: they are
evaluated with the corners of all chunks as tensors, in both directions. No mask is materialised. A mask that is no
interval is classified by the rule of block tables, in blocks of parts of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexgen.distributed.live_blocks import LiveBlocks
from flexgen.distributed.spans import Side, Spans
from flexgen.distributed.whole_mask import WholeMask
from flexgen.ir.graph import Node
from flexgen.lowering.bounds import Bound
from flexgen.lowering.facts import Direction
from flexgen.lowering.intervals import Interval
from flexgen.lowering.symbols import TRUE


@dataclass(frozen=True, slots=True, eq=False)
class LiveBoxes:
    """What is live of each pair of chunks.

    Attributes:
        q_lo, q_hi, kv_lo, kv_hi: int64 [query chunks, key chunks], on the CPU: every live pair of the two chunks has
            its query in [q_lo, q_hi) and its key in [kv_lo, kv_hi), indices of the whole; all are 0 where none is live.
        pairs: live pairs of each chunk of queries, of all batches and heads.
        is_exact: `pairs` are exact; else pairs of blocks that may hold a live one are counted too.
    """

    q_lo: Tensor
    q_hi: Tensor
    kv_lo: Tensor
    kv_hi: Tensor
    pairs: tuple[int, ...]
    is_exact: bool

    @property
    def live(self) -> Tensor:
        """Whether a pair of chunks has a live pair: bool [query chunks, key chunks]."""
        return self.q_lo < self.q_hi


def live_boxes(mask: WholeMask, chunks: int, grain: int = 1, *, count: bool = True) -> LiveBoxes:
    """Return what is live of each pair of chunks.

    Args:
        chunks: how many equal chunks queries and keys have; it divides both lengths.
        grain: ends are rounded outwards to multiples of it, counted from the chunk's first row.
        count: evaluate the mask where pairs of a mask that is no interval are not counted otherwise.
    """
    queries, keys = Side("q", mask.q_len, chunks), Side("kv", mask.kv_len, chunks)
    kv = _spans(mask, mask.facts.kv, queries, keys)
    q = _spans(mask, mask.facts.q, keys, queries).transposed()
    pairs, is_exact = _pairs_of_rows(mask, queries), True
    if pairs is None and (rule := mask.rule()) is not None:
        blocks = LiveBlocks.of(mask, rule, queries, keys, count=count)
        kv, q, pairs, is_exact = kv.meet(blocks.kv), q.meet(blocks.q), blocks.pairs, blocks.is_exact
    assert pairs is not None
    live = (q.lo < q.hi) & (kv.lo < kv.hi)
    kv, q = _rounded(kv, keys, grain), _rounded(q.transposed(), queries, grain).transposed()
    q_lo, q_hi, kv_lo, kv_hi = (torch.where(live, end, 0).cpu() for end in (q.lo, q.hi, kv.lo, kv.hi))
    return LiveBoxes(q_lo, q_hi, kv_lo, kv_hi, tuple(pairs.tolist()), is_exact)


def _rounded(spans: Spans, walked: Side, grain: int) -> Spans:
    """Return ranges [own chunks, walked chunks] with ends rounded outwards inside of their walked chunk."""
    start = walked.starts(spans.lo.device)
    lo, hi = spans.lo - start, spans.hi - start
    return Spans(start + lo // grain * grain, start + (-(-hi // grain) * grain).clamp(max=walked.size))


def _spans(mask: WholeMask, way: Direction, own: Side, walked: Side) -> Spans:
    """Return which of each walked chunk the rows of each own chunk see, as one range: [own chunks, walked chunks]."""
    starts = walked.starts(mask.device)
    shape = (own.chunks, walked.chunks)
    lo = torch.full(shape, walked.length, device=mask.device)
    hi = torch.zeros_like(lo)
    for segment in way.segments:
        first = torch.maximum(_end(mask, segment.visit_lo, own, "min")[:, None], starts)
        past = torch.minimum(_end(mask, segment.visit_hi, own, "max")[:, None], starts + walked.size)
        live = first < past
        lo = torch.where(live, torch.minimum(lo, first), lo)
        hi = torch.where(live, torch.maximum(hi, past), hi)
    return Spans(lo, hi)


def _end(mask: WholeMask, bound: Bound, own: Side, extreme: Literal["min", "max"]) -> Tensor:
    """Return one end for each own chunk, of all batches and heads: int64 [chunks]."""
    reduce = torch.amin if extreme == "min" else torch.amax
    if bound.reduce is None:
        start = own.starts(mask.device)
        corners = {f"{own.name}_lo": start, f"{own.name}_hi": start + own.size - 1}
        value = _along(mask.value(bound.node, corners), own.chunks)
    else:
        rows = {f"{own.name}_idx": torch.arange(own.length, device=mask.device)}
        value = _along(mask.value(bound.node, rows), own.length)
        value = reduce(value.reshape(*value.shape[:-1], own.chunks, own.size), -1)
    return reduce(value.reshape(-1, own.chunks), 0)


def _along(value: Tensor, size: int) -> Tensor:
    """Return a value for each of `size` places of the last axis, on which it may not depend."""
    return value.expand(*value.shape[:-1], size) if value.dim() else value.expand(size)


# Counting live pairs.


def _pairs_of_rows(mask: WholeMask, queries: Side) -> Tensor | None:
    """Return the live pairs of each chunk of queries; None where rows are not solved exactly. int64 [chunks]."""
    rows = mask.facts.kv.rows
    if not rows.is_exact:
        return None
    q_idx = torch.arange(mask.q_len, device=mask.device)
    ranges = [_row_range(mask, segment.outer, q_idx) for segment in rows.segments]
    if not ranges:
        return torch.zeros(queries.chunks, dtype=torch.int64, device=mask.device)
    shape = torch.broadcast_shapes(*(end.shape for ends in ranges for end in ends))  # type: ignore[no-untyped-call]
    lo, hi = (torch.stack([end.expand(shape) for end in ends]) for ends in zip(*ranges, strict=True))
    counts = _along(_united(lo, hi), mask.q_len)
    copies = mask.batch * mask.heads // (counts.numel() // mask.q_len)  # batches and heads that a count stands for
    return counts.reshape(-1, queries.chunks, queries.size).sum((0, 2)) * copies


def _row_range(mask: WholeMask, interval: Interval, q_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of an interval for each query, clamped to the keys; equal where it is empty."""

    def value(node: Node) -> Tensor:
        return mask.value(node, {"q_idx": q_idx})

    lo = value(interval.lo) if interval.lo is not None else torch.zeros_like(q_idx)
    hi = value(interval.hi) if interval.hi is not None else torch.full_like(q_idx, mask.kv_len)
    lo = lo.clamp(0, mask.kv_len)
    hi = torch.maximum(hi.clamp(0, mask.kv_len), lo)
    return lo, hi if interval.guard is TRUE else torch.where(value(interval.guard), hi, lo)


def _united(lo: Tensor, hi: Tensor) -> Tensor:
    """Return how many indices lie in the union of ranges that are stacked along the first axis."""
    if len(lo) == 1:
        return (hi - lo)[0]
    lo, order = lo.sort(0)
    hi = hi.gather(0, order)
    before = torch.cat([torch.zeros_like(hi[:1]), hi.cummax(0).values[:-1]])
    return (hi - torch.maximum(lo, before)).clamp(min=0).sum(0)
