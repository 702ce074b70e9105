"""What is live of pairs of chunks under a mask that is no interval, by the rule of block tables for parts of chunks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.distributed.spans import Side, Spans
from flexgen.distributed.whole_mask import WholeMask
from flexgen.ir.graph import Axis
from flexgen.lowering.blocks import BlockRule

MOST_BLOCKS = 1024  # along an axis, in which chunks are cut for the rule of block tables; more chunks are not cut
SHORTEST_BLOCK = 16
MOST_PAIRS = 1 << 26  # of partly live blocks that are evaluated to count them: two seconds; guess
_PAIRS_AT_ONCE = 1 << 21
_BLOCKS_AT_ONCE = 1 << 21  # classified at a time: the rule's int64 intermediates take eight bytes for each


@dataclass(frozen=True, slots=True, eq=False)
class LiveBlocks:
    """What the rule of block tables says of parts of chunks.

    Attributes:
        q, kv: the ranges of queries and keys that live blocks of a pair of chunks span: [query chunks, key chunks].
        pairs: live pairs of each chunk of queries, of all batches and heads.
        is_exact: they are; else they are those of blocks that may hold a live one.
    """

    q: Spans
    kv: Spans
    pairs: Tensor
    is_exact: bool

    @classmethod
    def of(cls, mask: WholeMask, rule: BlockRule, queries: Side, keys: Side, *, count: bool) -> LiveBlocks:
        rows, columns = (Side(side.name, side.length, side.chunks * _cuts(side)) for side in (queries, keys))
        axes = rule.mask_axes if count else rule.axes
        batches = range(mask.batch) if Axis.B in axes else range(1)
        heads = range(mask.heads) if Axis.H in axes else range(1)
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


def _hull(live: Tensor, start: Tensor, size: int) -> Spans:
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
    return Spans(start + first * size, start + past * size)
