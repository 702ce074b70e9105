"""Which tiles a kernel visits, as its schedule says, beside which tiles hold live pairs, as the mask itself says."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.commands.mask_subject import MaskSubject
from flexgen.commands.tile_map_ranges import RangeWalk, packed_heads
from flexgen.commands.tile_map_table import listed_blocks
from flexgen.commands.tile_pairs import count_in_tiles
from flexgen.errors import InternalError
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.plans import WalkPlan
from flexgen.lowering.schedule import Walk
from flexgen.runtime.mask_counts import MaskGrid, count_live_entries
from flexgen.runtime.mask_evaluation import CalledMask, Mod

# Pairs of a mask that are evaluated, all of them; beyond, only those of tiles whose state the compiler did not prove.
EVERY_PAIR = 1 << 27


class Visit(enum.IntEnum):
    """What the kernel does with a tile."""

    SKIPPED = 0
    CHECKED = 1  # the mask is applied
    UNMASKED = 2  # known to be live in full


class Live(enum.IntEnum):
    """What the mask says of a tile."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class TileMap:
    """The tiles of one query head (with packed heads, of a group).

    Attributes:
        rows, columns: queries and keys of a tile.
        visits: int8 [query tiles, key tiles], values of Visit.
        pairs, sizes: int64 [query tiles, key tiles], how many live pairs a tile holds, and how many pairs.
        proven: pairs of skipped and unmasked tiles are taken from the compiler's proof: there are too many to evaluate.
    """

    rows: int
    columns: int
    visits: Tensor
    pairs: Tensor
    sizes: Tensor
    proven: bool = False

    @property
    def live(self) -> Tensor:
        """int8 [query tiles, key tiles], values of Live."""
        some = torch.where(self.pairs == self.sizes, int(Live.FULL), int(Live.PARTIAL))
        return torch.where(self.pairs == 0, int(Live.EMPTY), some).char()

    def count(self, visit: Visit | None = None, live: Live | None = None) -> int:
        chosen = torch.ones_like(self.visits, dtype=torch.bool)
        if visit is not None:
            chosen &= self.visits == visit
        if live is not None:
            chosen &= self.live == live
        return int(chosen.sum())

    @property
    def needless(self) -> int:
        """Tiles that are visited without a live key."""
        return self.count(live=Live.EMPTY) - self.count(Visit.SKIPPED, Live.EMPTY)


def map_tiles(mask: MaskSubject, plan: WalkPlan, rule: BlockRule | None, every_pair: int = EVERY_PAIR) -> TileMap:
    """Return the tiles of one (batch, query head).

    Args:
        rule: how blocks are classified; for plans that walk a derived table.
        every_pair: masks of at most this many pairs are evaluated in whole, which checks the schedule.

    Raises:
        CaptureError: the mask raised at an index of this shape.
        InternalError: the schedule contradicts the mask.
    """
    rows = max(plan.BLOCK_M // packed_heads(plan), 1)
    visits = visit_tiles(mask, plan, rule, rows)
    sizes = lengths(mask.shape.Lq, rows)[:, None] * lengths(mask.shape.Lk, plan.BLOCK_N)[None, :]
    proven = mask.shape.Lq * mask.shape.Lk > every_pair
    pairs = _pairs_of_checked(mask, visits, sizes, rows, plan.BLOCK_N) if proven else None
    tiles = TileMap(
        rows,
        plan.BLOCK_N,
        visits,
        count_pairs(mask, rows, plan.BLOCK_N) if pairs is None else pairs,
        sizes,
        proven,
    )
    _verify(tiles)
    return tiles


def count_pairs(mask: MaskSubject, rows: int, columns: int) -> Tensor:
    """Return int64 [query groups, key groups]: the live pairs of each group of rows x columns."""
    grid = MaskGrid(1, 1, mask.shape.Lq, mask.shape.Lk, rows, columns)
    if mask.mod is None:
        return lengths(mask.shape.Lq, rows)[:, None] * lengths(mask.shape.Lk, columns)[None, :]
    return count_live_entries(CalledMask(_at_place(mask.mod, mask)), grid, torch.device("cpu"))[0, 0]


def _at_place(mod: Mod, mask: MaskSubject) -> Mod:
    return lambda b, h, q_idx, kv_idx: mod(b + mask.place.b, h + mask.place.h, q_idx, kv_idx)


def lengths(length: int, tile: int) -> Tensor:
    """Return how much of each tile lies inside of the axis."""
    return (length - torch.arange(0, length, tile)).clamp(max=tile)


def visit_tiles(mask: MaskSubject, plan: WalkPlan, rule: BlockRule | None, rows: int) -> Tensor:
    """Return int8 [query tiles, key tiles], values of Visit, of tiles of `rows` queries."""
    if plan.schedule.walk is Walk.DERIVED and rule is not None:
        visited, unmasked = _of_table(mask, plan, rule, rows)
    else:
        visited, unmasked = RangeWalk(plan, mask, rows).tiles()
    return (visited.char() + unmasked.char()).contiguous()


def _of_table(mask: MaskSubject, plan: WalkPlan, rule: BlockRule, rows: int) -> tuple[Tensor, Tensor]:
    """Cut the blocks of a table in tiles."""
    blocks = listed_blocks(rule, plan, mask)
    high, wide = plan.SPARSE_Q_BLOCK_SIZE // rows, plan.SPARSE_KV_BLOCK_SIZE // plan.BLOCK_N
    tiles = (-(-mask.shape.Lq // rows), -(-mask.shape.Lk // plan.BLOCK_N))
    cut = (
        found.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: tiles[0], : tiles[1]]
        for found in (blocks.listed, blocks.full)
    )
    return next(cut), next(cut)


def _pairs_of_checked(mask: MaskSubject, visits: Tensor, sizes: Tensor, rows: int, columns: int) -> Tensor:
    """Count live pairs where the mask is applied; elsewhere all or none are live, as was proven."""
    counted = count_in_tiles(mask, visits == Visit.CHECKED, rows, columns)
    return torch.where(visits == Visit.UNMASKED, sizes, counted)


def _verify(tiles: TileMap) -> None:
    missed = tiles.count(Visit.SKIPPED) - tiles.count(Visit.SKIPPED, Live.EMPTY)
    unmasked = tiles.count(Visit.UNMASKED) - tiles.count(Visit.UNMASKED, Live.FULL)
    if missed or unmasked:
        raise InternalError(
            f"the schedule skips {missed} tiles with live keys and leaves the mask out of {unmasked} that need it"
        )
