"""Which blocks a derived block table lists: the mask's block rule, evaluated without a kernel."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.commands.mask_subject import MaskSubject, Place
from flexgen.commands.tile_pairs import count_in_tiles
from flexgen.ir.graph import Axis, Node
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.plans import WalkPlan
from flexgen.lowering.table_plan import drops_empty, table_axes
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.problem import TableForm
from flexgen.runtime.table_cache import MAX_BLOCKS

# Blocks classified at a time; the rule's int64 intermediates take eight bytes for each of them.
_BLOCKS_AT_ONCE = 1 << 21
_ENTRY_BYTES = 4  # lists hold int32
_COUNT_BYTES = 8  # how many blocks all rows list, int64


@dataclass(frozen=True, slots=True)
class ListedBlocks:
    """The blocks of one (batch, query head): bool [query blocks, key blocks]; full ones are listed too."""

    listed: Tensor
    full: Tensor


@dataclass(frozen=True, slots=True)
class TableSummary:
    """A whole table.

    Attributes:
        blocks, listed, full: blocks there are, that it lists, and of those listed as full; of all its (batch, head).
        batch, heads: for how many it keeps lists: 1 where they are the same for each.
        nbytes: device memory it keeps, as `attention.block_table(query, key)` makes it, which waits for its size.
        most_bytes: the same where a call makes it for itself, with room for every block, up to a limit.
    """

    blocks: int
    listed: int
    full: int
    batch: int
    heads: int
    nbytes: int
    most_bytes: int


def listed_blocks(rule: BlockRule, plan: WalkPlan, mask: MaskSubject) -> ListedBlocks:
    """Classify every block at the mask's place."""
    rows, columns = (_inputs(rule, plan, mask, axis) for axis in (Axis.Q, Axis.KV))
    counts = (len(rows["q_lo"]), len(columns["kv_lo"]))
    across = {name: values[None, :] for name, values in columns.items()}
    step = max(_BLOCKS_AT_ONCE // max(counts[1], 1), 1)
    listed, full = (torch.zeros(counts, dtype=torch.bool) for _ in range(2))
    for start in range(0, counts[0], step):
        strip = slice(start, start + step)
        inputs = {name: values[strip, None] for name, values in rows.items()} | across
        listed[strip] = mask.value(rule.may_live, inputs)
        full[strip] = listed[strip] & mask.value(rule.all_live, inputs)
    if drops_empty(rule, derived_form(plan)):
        counted = count_in_tiles(mask, listed & ~full, plan.SPARSE_Q_BLOCK_SIZE, plan.SPARSE_KV_BLOCK_SIZE)
        listed = full | (counted > 0)
    return ListedBlocks(listed, full)


def summarise_table(rule: BlockRule, plan: ForwardPlan, mask: MaskSubject) -> TableSummary:
    """Count what the table of a whole call lists and takes."""
    axes = table_axes(rule, derived_form(plan))
    batch = mask.shape.B if Axis.B in axes else min(mask.shape.B, 1)
    heads = mask.shape.Hq if Axis.H in axes else min(mask.shape.Hq, 1)
    places = [mask.at(Place(b, h)) for b, h in itertools.product(range(batch), range(heads))]
    blocks = listed = full = 0
    for place in places:
        found = listed_blocks(rule, plan, place)
        blocks += found.listed.numel()
        listed += int(found.listed.sum())
        full += int(found.full.sum())
    return TableSummary(
        blocks,
        listed,
        full,
        batch,
        heads,
        _nbytes(plan, mask, batch * heads, listed),
        _nbytes(plan, mask, batch * heads, min(blocks, MAX_BLOCKS)),
    )


def derived_form(plan: WalkPlan) -> TableForm:
    """Return the form of the derived table that a plan walks."""
    return TableForm(plan.SPARSE_Q_BLOCK_SIZE, plan.SPARSE_KV_BLOCK_SIZE, True, derived=True)


def _nbytes(plan: ForwardPlan, mask: MaskSubject, tables: int, capacity: int) -> int:
    """Return the memory of the lists: two counts and an offset for each row, and the indices behind all columns."""
    rows = -(-mask.shape.Lq // plan.SPARSE_Q_BLOCK_SIZE)
    columns = -(-mask.shape.Lk // plan.SPARSE_KV_BLOCK_SIZE)
    return (3 * rows * tables + columns + capacity) * _ENTRY_BYTES + _COUNT_BYTES


def _inputs(rule: BlockRule, plan: WalkPlan, mask: MaskSubject, axis: Axis) -> dict[str, Tensor]:
    """Return what the rule reads of one axis, a value for each of its blocks."""
    side, length, size = (
        ("q", mask.shape.Lq, plan.SPARSE_Q_BLOCK_SIZE)
        if axis is Axis.Q
        else ("kv", mask.shape.Lk, plan.SPARSE_KV_BLOCK_SIZE)
    )
    lo = torch.arange(0, length, size)
    inputs = {f"{side}_lo": lo, f"{side}_hi": (lo + size).clamp(max=length) - 1}
    for leaf in rule.leaves_of(axis):
        values = mask.value(leaf.node, {f"{side}_idx": torch.arange(length)})
        least, greatest = _extremes(values, size)
        inputs |= {_name(leaf.least): least, _name(leaf.greatest): greatest}
    return inputs


def _extremes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the least and greatest of each group of `size`, the last one possibly short; NaN where one is NaN."""
    last = values[-1:].expand(-len(values) % size)
    groups = torch.cat([values, last]).reshape(-1, size)
    return groups.amin(1), groups.amax(1)


def _name(extreme: Node) -> str:
    return str(extreme.attr)
