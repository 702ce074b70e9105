"""Which tiles a kernel visits, from its schedule's bounds, beside which tiles hold live keys, from the mask itself."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.commands.arguments import Shape
from flexgen.errors import InternalError
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Node
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.mask_counts import MaskGrid, count_live_entries
from flexgen.runtime.mask_evaluation import Mod


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
        visits, live: int8 [query tiles, key tiles], values of Visit and Live.
    """

    rows: int
    columns: int
    visits: Tensor
    live: Tensor

    def count(self, visit: Visit | None = None, live: Live | None = None) -> int:
        chosen = torch.ones_like(self.live, dtype=torch.bool)
        if visit is not None:
            chosen &= self.visits == visit
        if live is not None:
            chosen &= self.live == live
        return int(chosen.sum())

    @property
    def needless(self) -> int:
        """Tiles that are visited without a live key."""
        return self.count(live=Live.EMPTY) - self.count(Visit.SKIPPED, Live.EMPTY)


@dataclass(frozen=True, slots=True)
class Place:
    """Which batch and query head is looked at."""

    b: int = 0
    h: int = 0


def map_tiles(
    mask_mod: Mod | None,
    plan: ForwardPlan,
    shape: Shape,
    place: Place,
    buffers: Mapping[str, Tensor],
    scalars: Mapping[str, int | float],
) -> TileMap:
    """Return the tiles of one (batch, query head).

    Args:
        buffers, scalars: what the mask captured, by name.

    Raises:
        CaptureError: the mask raised at an index of this shape.
        InternalError: the schedule contradicts the mask.
    """
    rows = max(plan.BLOCK_M // plan.index_map.packed_heads, 1)
    visits = _Walk(plan, shape, place, rows, buffers, scalars).visits()
    tiles = TileMap(rows, plan.BLOCK_N, visits, _live_tiles(mask_mod, shape, place, rows, plan.BLOCK_N))
    _verify(tiles)
    return tiles


def _verify(tiles: TileMap) -> None:
    missed = tiles.count(Visit.SKIPPED) - tiles.count(Visit.SKIPPED, Live.EMPTY)
    unmasked = tiles.count(Visit.UNMASKED) - tiles.count(Visit.UNMASKED, Live.FULL)
    if missed or unmasked:
        raise InternalError(
            f"the schedule skips {missed} tiles with live keys and leaves the mask out of {unmasked} that need it"
        )


def _live_tiles(mask_mod: Mod | None, shape: Shape, place: Place, rows: int, columns: int) -> Tensor:
    grid = MaskGrid(1, 1, shape.Lq, shape.Lk, rows, columns)
    if mask_mod is None:
        return torch.full((grid.num_q_blocks, grid.num_kv_blocks), int(Live.FULL), dtype=torch.int8)
    live = count_live_entries(_at(mask_mod, place), grid, torch.device("cpu"))[0, 0]
    sizes = _lengths(shape.Lq, rows)[:, None] * _lengths(shape.Lk, columns)[None, :]
    return torch.where(live == 0, int(Live.EMPTY), torch.where(live == sizes, int(Live.FULL), int(Live.PARTIAL))).char()


def _at(mask_mod: Mod, place: Place) -> Mod:
    return lambda b, h, q_idx, kv_idx: mask_mod(b + place.b, h + place.h, q_idx, kv_idx)


def _lengths(length: int, tile: int) -> Tensor:
    """Return how much of each tile lies inside of the axis."""
    return (length - torch.arange(0, length, tile)).clamp(max=tile)


class _Walk:
    """Evaluates the bounds of a schedule at every query tile, as the kernel does."""

    def __init__(
        self,
        plan: ForwardPlan,
        shape: Shape,
        place: Place,
        rows: int,
        buffers: Mapping[str, Tensor],
        scalars: Mapping[str, int | float],
    ) -> None:
        self._plan, self._shape, self._rows = plan, shape, rows
        self._buffers, self._scalars = buffers, scalars
        packed = plan.index_map.packed_heads
        first_head = place.h // packed * packed
        start = torch.arange(0, shape.Lq, rows)
        self._tiles = len(start)
        self._inputs = {
            **{name: torch.tensor(value) for name, value in (("Q_LEN", shape.Lq), ("KV_LEN", shape.Lk))},
            "b": torch.tensor(place.b),
            "h_lo": torch.tensor(first_head),
            "h_hi": torch.tensor(first_head + packed - 1),
            "q_lo": start,
            "q_hi": (start + rows).clamp(max=shape.Lq) - 1,
            "h": torch.arange(first_head, first_head + packed)[:, None] if packed > 1 else torch.tensor(place.h),
            "q_idx": torch.arange(shape.Lq),
        }

    def visits(self) -> Tensor:
        """Return int8 [query tiles, key tiles]; where segments meet in a tile, the one that starts first has it."""
        columns = -(-self._shape.Lk // self._plan.BLOCK_N)
        found = torch.zeros(self._tiles, columns, dtype=torch.int8)
        segments = [self._segment(segment) for segment in self._plan.schedule.segments]
        for tile in range(self._tiles):
            taken = 0
            for lo, hi, full_lo, full_hi in sorted(tuple(int(end[tile]) for end in ends) for ends in segments):
                found[tile, max(lo, taken) : hi] = int(Visit.CHECKED)
                found[tile, max(full_lo, lo, taken) : min(full_hi, hi)] = int(Visit.UNMASKED)
                taken = max(taken, hi)
        return found

    def _segment(self, segment: SegmentBounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tile numbers lo, hi, full_lo, full_hi of each query tile."""
        block = self._plan.BLOCK_N
        lo, hi = self._end(segment.visit_lo) // block, -(-self._end(segment.visit_hi) // block)
        if segment.full_lo is None or segment.full_hi is None:
            return lo, hi, lo, lo
        return lo, hi, -(-self._end(segment.full_lo) // block), self._end(segment.full_hi) // block

    def _end(self, bound: Bound) -> Tensor:
        """Return one end at each query tile, clamped to the keys."""
        value = self._value(bound.node)
        if bound.reduce is not None:
            value = self._reduced(value.expand(*value.shape[:-1], self._shape.Lq), bound.reduce)
        return value.clamp(0, self._shape.Lk).expand(self._tiles)

    def _value(self, node: Node) -> Tensor:
        value = evaluate(Graph("mask", "bound", node), self._inputs, self._buffers, self._scalars)
        return value if value.dim() else value[None]

    def _reduced(self, per_row: Tensor, reduce: str) -> Tensor:
        """Reduce [heads, Lq] or [Lq] over the rows of each tile."""
        across = per_row if per_row.dim() == 1 else per_row.amin(0) if reduce == "min" else per_row.amax(0)
        pieces = torch.split(across, self._rows)
        return torch.stack([piece.min() if reduce == "min" else piece.max() for piece in pieces])
