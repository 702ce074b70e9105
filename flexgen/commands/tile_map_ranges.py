"""Which tiles a kernel visits whose schedule is ranges: the bounds of its segments, evaluated as the kernel does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flexgen.commands.mask_subject import MaskSubject
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.plans import AnyBackwardPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel


@dataclass(frozen=True, slots=True)
class Side:
    """One axis of the tiles: its name in bounds, its length, and how much of it a tile holds."""

    name: Literal["q", "kv"]
    length: int
    tile: int

    @property
    def tiles(self) -> int:
        return -(-self.length // self.tile)


def packed_heads(plan: WalkPlan) -> int:
    """Return how many query heads share a tile's rows."""
    return 1 if isinstance(plan, AnyBackwardPlan) else plan.index_map.packed_heads


class RangeWalk:
    """Evaluates the bounds of a schedule at every tile of the side that programs own.

    Args:
        rows: queries of a tile.
    """

    def __init__(self, plan: WalkPlan, mask: MaskSubject, rows: int) -> None:
        self._schedule, self._mask = plan.schedule, mask
        self._walks_queries = isinstance(plan, AnyBackwardPlan) and plan.kernel is BackwardKernel.DKDV
        queries, keys = Side("q", mask.shape.Lq, rows), Side("kv", mask.shape.Lk, plan.BLOCK_N)
        self._own, self._walked = (keys, queries) if self._walks_queries else (queries, keys)
        packed = packed_heads(plan)
        first_head = mask.place.h // packed * packed
        start = torch.arange(0, self._own.length, self._own.tile)
        self._inputs = {
            "h_lo": torch.tensor(first_head),
            "h_hi": torch.tensor(first_head + packed - 1),
            f"{self._own.name}_lo": start,
            f"{self._own.name}_hi": (start + self._own.tile).clamp(max=self._own.length) - 1,
            "h": torch.arange(first_head, first_head + packed)[:, None] if packed > 1 else torch.tensor(mask.place.h),
            f"{self._own.name}_idx": torch.arange(self._own.length),
        }

    def tiles(self) -> tuple[Tensor, Tensor]:
        """Return which tiles are visited, and which of them without the mask: bool [query tiles, key tiles].

        Where segments meet in a tile, the one that starts first has it.
        """
        visited, unmasked = (torch.zeros(self._own.tiles, self._walked.tiles, dtype=torch.bool) for _ in range(2))
        segments = [torch.stack(self._segment(segment), 1).tolist() for segment in self._schedule.segments]
        for tile in range(self._own.tiles):
            taken = 0
            for lo, hi, full_lo, full_hi in sorted(ends[tile] for ends in segments):
                visited[tile, max(lo, taken) : hi] = True
                unmasked[tile, max(full_lo, lo, taken) : min(full_hi, hi)] = True
                taken = max(taken, hi)
        return (visited.T, unmasked.T) if self._walks_queries else (visited, unmasked)

    def _segment(self, segment: SegmentBounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tile numbers lo, hi, full_lo, full_hi of each tile of the own side."""
        block = self._walked.tile
        lo, hi = self._end(segment.visit_lo) // block, -(-self._end(segment.visit_hi) // block)
        if segment.full_lo is None or segment.full_hi is None:
            return lo, hi, lo, lo
        return lo, hi, -(-self._end(segment.full_lo) // block), self._end(segment.full_hi) // block

    def _end(self, bound: Bound) -> Tensor:
        """Return one end at each tile of the own side, clamped to the walked one."""
        value = self._mask.value(bound.node, self._inputs)
        value = value if value.dim() else value[None]
        if bound.reduce is not None:
            value = self._reduced(value.expand(*value.shape[:-1], self._own.length), bound.reduce)
        return value.clamp(0, self._walked.length).expand(self._own.tiles)

    def _reduced(self, per_row: Tensor, reduce: str) -> Tensor:
        """Reduce [heads, length] or [length] over the rows of each tile."""
        across = per_row if per_row.dim() == 1 else per_row.amin(0) if reduce == "min" else per_row.amax(0)
        pieces = torch.split(across, self._own.tile)
        return torch.stack([piece.min() if reduce == "min" else piece.max() for piece in pieces])
