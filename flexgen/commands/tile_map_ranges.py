"""Which tiles a kernel visits whose schedule is ranges: the bounds of its segments, evaluated as the kernel does."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.commands.mask_subject import MaskSubject
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.triton.plan import ForwardPlan


class RangeWalk:
    """Evaluates the bounds of a schedule at every query tile.

    Args:
        rows: queries of a tile.
    """

    def __init__(self, plan: ForwardPlan, mask: MaskSubject, rows: int) -> None:
        self._plan, self._mask, self._rows = plan, mask, rows
        length = mask.shape.Lq
        packed = plan.index_map.packed_heads
        first_head = mask.place.h // packed * packed
        start = torch.arange(0, length, rows)
        self._tiles = len(start)
        self._inputs = {
            "h_lo": torch.tensor(first_head),
            "h_hi": torch.tensor(first_head + packed - 1),
            "q_lo": start,
            "q_hi": (start + rows).clamp(max=length) - 1,
            "h": torch.arange(first_head, first_head + packed)[:, None] if packed > 1 else torch.tensor(mask.place.h),
            "q_idx": torch.arange(length),
        }

    def tiles(self) -> tuple[Tensor, Tensor]:
        """Return which tiles are visited, and which of them without the mask: bool [query tiles, key tiles].

        Where segments meet in a tile, the one that starts first has it.
        """
        columns = -(-self._mask.shape.Lk // self._plan.BLOCK_N)
        visited, unmasked = (torch.zeros(self._tiles, columns, dtype=torch.bool) for _ in range(2))
        segments = [torch.stack(self._segment(segment), 1).tolist() for segment in self._plan.schedule.segments]
        for tile in range(self._tiles):
            taken = 0
            for lo, hi, full_lo, full_hi in sorted(ends[tile] for ends in segments):
                visited[tile, max(lo, taken) : hi] = True
                unmasked[tile, max(full_lo, lo, taken) : min(full_hi, hi)] = True
                taken = max(taken, hi)
        return visited, unmasked

    def _segment(self, segment: SegmentBounds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tile numbers lo, hi, full_lo, full_hi of each query tile."""
        block = self._plan.BLOCK_N
        lo, hi = self._end(segment.visit_lo) // block, -(-self._end(segment.visit_hi) // block)
        if segment.full_lo is None or segment.full_hi is None:
            return lo, hi, lo, lo
        return lo, hi, -(-self._end(segment.full_lo) // block), self._end(segment.full_hi) // block

    def _end(self, bound: Bound) -> Tensor:
        """Return one end at each query tile, clamped to the keys."""
        value = self._mask.value(bound.node, self._inputs)
        value = value if value.dim() else value[None]
        if bound.reduce is not None:
            value = self._reduced(value.expand(*value.shape[:-1], self._mask.shape.Lq), bound.reduce)
        return value.clamp(0, self._mask.shape.Lk).expand(self._tiles)

    def _reduced(self, per_row: Tensor, reduce: str) -> Tensor:
        """Reduce [heads, Lq] or [Lq] over the rows of each tile."""
        across = per_row if per_row.dim() == 1 else per_row.amin(0) if reduce == "min" else per_row.amax(0)
        pieces = torch.split(across, self._rows)
        return torch.stack([piece.min() if reduce == "min" else piece.max() for piece in pieces])
