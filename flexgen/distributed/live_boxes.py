"""Which rows of a chunk of queries see which rows of a chunk of keys, for all pairs of chunks at once.

The bounds that the analysis proved for a tile of a kernel hold for a chunk as well, which is a large tile: they are
evaluated with the corners of all chunks as tensors, in both directions. No mask is materialised. A mask that is no
interval is classified by the rule of block tables, in blocks of parts of chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexgen.distributed.whole_mask import WholeMask
from flexgen.ir.graph import Axis, Node
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.bounds import Bound
from flexgen.lowering.facts import Direction
from flexgen.lowering.intervals import Interval
from flexgen.lowering.symbols import TRUE

MOST_BLOCKS = 1024  # along an axis, in which chunks are cut for the rule of block tables; more chunks are not cut
SHORTEST_BLOCK = 16
MOST_PAIRS = 1 << 26  # of partly live blocks that are evaluated to count them: two seconds; guess
_PAIRS_AT_ONCE = 1 << 21
_BLOCKS_AT_ONCE = 1 << 21  # classified at a time: the rule's int64 intermediates take eight bytes for each


@dataclass(frozen=True, slots=True)
class Side:
    """The chunks of one axis: equal parts of its length."""

    name: Literal["q", "kv"]
    length: int
    chunks: int

    @property
    def size(self) -> int:
        return self.length // self.chunks

    def starts(self, device: torch.device) -> Tensor:
        """Return where each chunk begins: int64 [chunks]."""
        return torch.arange(self.chunks, device=device) * self.size


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


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Half-open ranges, int64 of one shape; empty where lo >= hi."""

    lo: Tensor
    hi: Tensor

    def meet(self, other: _Spans) -> _Spans:
        return _Spans(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def transposed(self) -> _Spans:
        return _Spans(self.lo.T, self.hi.T)


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
        blocks = _Blocks.of(mask, rule, queries, keys, count=count)
        kv, q, pairs, is_exact = kv.meet(blocks.kv), q.meet(blocks.q), blocks.pairs, blocks.is_exact
    assert pairs is not None
    live = (q.lo < q.hi) & (kv.lo < kv.hi)
    kv, q = _rounded(kv, keys, grain), _rounded(q.transposed(), queries, grain).transposed()
    q_lo, q_hi, kv_lo, kv_hi = (torch.where(live, end, 0).cpu() for end in (q.lo, q.hi, kv.lo, kv.hi))
    return LiveBoxes(q_lo, q_hi, kv_lo, kv_hi, tuple(pairs.tolist()), is_exact)


def _rounded(spans: _Spans, walked: Side, grain: int) -> _Spans:
    """Return ranges [own chunks, walked chunks] with ends rounded outwards inside of their walked chunk."""
    start = walked.starts(spans.lo.device)
    lo, hi = spans.lo - start, spans.hi - start
    return _Spans(start + lo // grain * grain, start + (-(-hi // grain) * grain).clamp(max=walked.size))


def _spans(mask: WholeMask, way: Direction, own: Side, walked: Side) -> _Spans:
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
    return _Spans(lo, hi)


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
        return torch.zeros(queries.chunks, dtype=torch.int64)
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


# Masks that are no intervals.


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """What the rule of block tables says of parts of chunks.

    Attributes:
        q, kv: the ranges of queries and keys that live blocks of a pair of chunks span: [query chunks, key chunks].
        pairs: live pairs of each chunk of queries, of all batches and heads.
        is_exact: they are; else they are those of blocks that may hold a live one.
    """

    q: _Spans
    kv: _Spans
    pairs: Tensor
    is_exact: bool

    @classmethod
    def of(cls, mask: WholeMask, rule: BlockRule, queries: Side, keys: Side, *, count: bool) -> _Blocks:
        rows, columns = (Side(side.name, side.length, side.chunks * _cuts(side)) for side in (queries, keys))
        batches = range(mask.batch) if Axis.B in rule.axes else range(1)
        heads = range(mask.heads) if Axis.H in rule.axes else range(1)
        anywhere = torch.zeros(rows.chunks, columns.chunks, dtype=torch.bool, device=mask.device)
        pairs = torch.zeros(rows.chunks, dtype=torch.int64, device=mask.device)
        budget = MOST_PAIRS if count else 0
        is_exact = True
        for b, h in itertools.product(batches, heads):
            place = {"b": torch.tensor(b, device=mask.device), "h": torch.tensor(h, device=mask.device)}
            found = _classified(mask, rule, rows, columns, place)
            anywhere |= found.may_live
            partial = found.may_live & ~found.all_live
            budget -= int(partial.sum()) * rows.size * columns.size
            is_exact &= budget >= 0
            whole = found.all_live if is_exact else found.may_live
            pairs += whole.sum(1) * (rows.size * columns.size)
            if is_exact:
                pairs += _evaluated(mask, partial, rows, columns, place)
        copies = mask.batch * mask.heads // (len(batches) * len(heads))
        parts = anywhere.reshape(queries.chunks, _cuts(queries), keys.chunks, _cuts(keys))
        q = _hull(parts.any(3).transpose(1, 2), queries.starts(mask.device)[:, None], rows.size)
        kv = _hull(parts.any(1), keys.starts(mask.device), columns.size)
        return cls(q, kv, pairs.reshape(queries.chunks, -1).sum(1) * copies, is_exact)


def _cuts(side: Side) -> int:
    """Return in how many equal blocks a chunk is cut."""
    most = min(MOST_BLOCKS // side.chunks, side.size // SHORTEST_BLOCK)
    return next((count for count in range(most, 1, -1) if side.size % count == 0), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Classes:
    """Which blocks may hold a live pair, and which are live as a whole: bool [row blocks, column blocks]."""

    may_live: Tensor
    all_live: Tensor


def _classified(mask: WholeMask, rule: BlockRule, rows: Side, columns: Side, place: dict[str, Tensor]) -> _Classes:
    """Classify blocks at one batch and head."""
    down, across = (_rule_inputs(mask, rule, side, place) for side in (rows, columns))
    across = {name: values[None, :] for name, values in across.items()}
    step = max(_BLOCKS_AT_ONCE // columns.chunks, 1)
    may_live, all_live = (
        torch.empty(rows.chunks, columns.chunks, dtype=torch.bool, device=mask.device) for _ in range(2)
    )
    for start in range(0, rows.chunks, step):
        strip = slice(start, start + step)
        inputs = {name: values[strip, None] for name, values in down.items()} | across | place
        may_live[strip] = mask.value(rule.may_live, inputs)
        all_live[strip] = mask.value(rule.all_live, inputs)
    return _Classes(may_live, all_live & may_live)


def _evaluated(mask: WholeMask, chosen: Tensor, rows: Side, columns: Side, place: dict[str, Tensor]) -> Tensor:
    """Return the live pairs of chosen blocks at one batch and head, by row of blocks: int64 [row blocks]."""
    assert mask.graph is not None
    pairs = torch.zeros(rows.chunks, dtype=torch.int64, device=mask.device)
    row, column = chosen.nonzero(as_tuple=True)
    step = max(_PAIRS_AT_ONCE // (rows.size * columns.size), 1)
    in_row, in_column = (torch.arange(side.size, device=mask.device) for side in (rows, columns))
    for r, c in zip(torch.split(row, step), torch.split(column, step), strict=True):
        q_idx = (r[:, None] * rows.size + in_row)[:, :, None]
        kv_idx = (c[:, None] * columns.size + in_column)[:, None, :]
        live = mask.value(mask.graph.root, {"q_idx": q_idx, "kv_idx": kv_idx} | place)
        pairs.index_add_(0, r, live.expand(len(r), rows.size, columns.size).sum((1, 2)))
    return pairs


def _rule_inputs(mask: WholeMask, rule: BlockRule, side: Side, place: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the rule reads of one axis, a value for each of its blocks."""
    start = side.starts(mask.device)
    inputs = {f"{side.name}_lo": start, f"{side.name}_hi": start + side.size - 1}
    for leaf in rule.leaves_of(Axis.Q if side.name == "q" else Axis.KV):
        index = torch.arange(side.length, device=mask.device)
        values = mask.value(leaf.node, {f"{side.name}_idx": index} | place).reshape(side.chunks, side.size)
        inputs |= {str(leaf.least.attr): values.amin(1), str(leaf.greatest.attr): values.amax(1)}
    return inputs


def _hull(live: Tensor, start: Tensor, size: int) -> _Spans:
    """Return the range that the live parts of each chunk span.

    Args:
        live: bool [query chunks, key chunks, parts].
        start: where the first part begins; broadcasts to [query chunks, key chunks].
        size: rows of a part.
    """
    parts = live.shape[2]
    number = torch.arange(parts, device=live.device)
    first = torch.where(live, number, parts).amin(2)
    past = torch.where(live, number + 1, 0).amax(2)
    return _Spans(start + first * size, start + past * size)
