"""Compares what the analysis says of a mask with the mask itself, evaluated on a whole small grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Axis, Graph, Node
from flexgen.lowering.bounds import Bound
from flexgen.lowering.facts import Direction, MaskFacts, analyse_mask
from flexgen.lowering.intervals import Interval
from flexgen.lowering.symbols import TRUE


@dataclass(frozen=True)
class Grid:
    """Sizes, tables and scalars with which a mask is evaluated."""

    q_len: int = 21
    kv_len: int = 26
    batches: int = 1
    heads: int = 1
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int] = field(default_factory=dict)

    def inputs(self) -> dict[str, Tensor]:
        sizes = {"b": self.batches, "h": self.heads, "q_idx": self.q_len, "kv_idx": self.kv_len}
        found = {"Q_LEN": torch.tensor(self.q_len), "KV_LEN": torch.tensor(self.kv_len)}
        for place, (name, size) in enumerate(sizes.items()):
            found[name] = torch.arange(size).reshape([-1 if i == place else 1 for i in range(4)])
        return found

    def value(self, node: Node, **corners: Tensor) -> Tensor:
        return evaluate(Graph("mask", "part", node), {**self.inputs(), **corners}, self.buffers, self.scalars)

    def mask(self, mask: Node) -> Tensor:
        """The live entries, [B, H, Q, KV]."""
        return self.value(mask).expand(self.batches, self.heads, self.q_len, self.kv_len)


@dataclass(frozen=True)
class Tile:
    """The rows of one tile of one batch: heads [h, h + heads) and rows [start, stop) of the walked axis."""

    b: int
    h_lo: int
    h_hi: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Visits:
    """How many tiles are visited, and how many hold a live entry."""

    visited: int
    ideal: int


class Checker:
    """Checks one direction of the facts of one mask on one grid."""

    def __init__(self, mask: Node, direction: Direction, axis: Axis, grid: Grid) -> None:
        self.direction, self.axis, self.grid = direction, axis, grid
        live = grid.mask(mask)
        self.live = live if axis is Axis.KV else live.transpose(2, 3)  # [B, H, rows, solved]
        self.length = self.live.shape[3]

    def check_rows(self) -> None:
        """Live lies inside of the outer intervals; the inner intervals are live."""
        outer = torch.zeros_like(self.live)
        inner = torch.zeros_like(self.live)
        for segment in self.direction.rows.segments:
            outer = outer | self._members(segment.outer)
            if segment.inner is not None:
                inner = inner | self._members(segment.inner)
        assert not (self.live & ~outer).any(), "a live key lies outside of the row's intervals"
        assert not (inner & ~self.live).any(), "a masked key lies inside of an inner interval"
        if self.direction.rows.is_exact:
            assert (outer == self.live).all(), "the row's intervals are not exact"

    def _members(self, interval: Interval) -> Tensor:
        index = torch.arange(self.length)
        members = index.ge(self._rows(interval.lo)) if interval.lo is not None else torch.ones_like(self.live)
        if interval.hi is not None:
            members = members & index.lt(self._rows(interval.hi))
        return (members & self._rows(interval.guard)) if interval.guard is not TRUE else members

    def _rows(self, node: Node) -> Tensor:
        """A value per row, [B|1, H|1, rows|1, 1]."""
        value = self.grid.value(node)
        value = value.reshape([1] * (4 - value.ndim) + list(value.shape))
        return value if self.axis is Axis.KV else value.transpose(2, 3)

    def tiles(self, size: int, heads: int) -> list[Tile]:
        rows = self.live.shape[2]
        return [
            Tile(b, h, min(h + heads, self.grid.heads) - 1, lo, min(lo + size, rows) - 1)
            for b in range(self.grid.batches)
            for h in range(0, self.grid.heads, heads)
            for lo in range(0, rows, size)
        ]

    def check_tiles(self, size: int, columns: int, heads: int = 1) -> Visits:
        """Every live entry is visited, full ranges are live in full, and count tiles of `columns` columns."""
        tiles = self.tiles(size, heads)
        visited = torch.zeros(len(tiles), self.length, dtype=torch.bool)
        full = torch.zeros_like(visited)
        touched = torch.zeros(len(tiles), -(-self.length // columns), dtype=torch.bool)
        for segment in self.direction.segments:
            visited |= self._between(segment.visit_lo, segment.visit_hi, tiles, 1)
            touched |= self._between(segment.visit_lo, segment.visit_hi, tiles, columns)
            if segment.full_lo is not None and segment.full_hi is not None:
                full |= self._between(segment.full_lo, segment.full_hi, tiles, 1)
        some = torch.stack([self._of_tile(tile).any(0).any(0) for tile in tiles])
        every = torch.stack([self._of_tile(tile).all(0).all(0) for tile in tiles])
        assert not (some & ~visited).any(), "a live entry is not visited"
        assert not (full & ~every).any(), "a masked entry lies in a full range"
        padded = torch.nn.functional.pad(some, (0, -self.length % columns))
        return Visits(int(touched.sum()), int(padded.reshape(len(tiles), -1, columns).any(2).sum()))

    def _of_tile(self, tile: Tile) -> Tensor:
        return self.live[tile.b, tile.h_lo : tile.h_hi + 1, tile.lo : tile.hi + 1]

    def _between(self, lo: Bound, hi: Bound, tiles: list[Tile], columns: int) -> Tensor:
        """Which groups of columns a range touches, [tiles, groups]."""
        start, stop = (self._ends(bound, tiles)[:, None] for bound in (lo, hi))
        group = torch.arange(-(-self.length // columns))
        return (start < stop) & (group >= start // columns) & (group < (stop + columns - 1) // columns)

    def _ends(self, bound: Bound, tiles: list[Tile]) -> Tensor:
        """The bound of each tile, clamped to the axis as kernels do."""
        if bound.reduce is None:
            names = ("q_lo", "q_hi") if self.axis is Axis.KV else ("kv_lo", "kv_hi")
            fields = zip(("b", "h_lo", "h_hi", *names), ("b", "h_lo", "h_hi", "lo", "hi"), strict=True)
            corners = {name: torch.tensor([getattr(tile, field) for tile in tiles]) for name, field in fields}
            return self.grid.value(bound.node, **corners).clamp(0, self.length).expand(len(tiles))
        rows = self._rows(bound.node).expand(self.grid.batches, self.grid.heads, self.live.shape[2], 1)
        parts = [rows[tile.b, tile.h_lo : tile.h_hi + 1, tile.lo : tile.hi + 1] for tile in tiles]
        reduced = [part.min() if bound.reduce == "min" else part.max() for part in parts]
        return torch.stack(reduced).clamp(0, self.length)


def check_mask(mask: Node, grid: Grid, facts: MaskFacts | None = None) -> None:
    """Check both directions by row and by tile, and the proofs."""
    facts = facts or analyse_mask(Graph("mask", "mask", mask))
    for direction, axis in ((facts.kv, Axis.KV), (facts.q, Axis.Q)):
        checker = Checker(mask, direction, axis, grid)
        checker.check_rows()
        for size, heads in ((1, 1), (6, 1), (8, 2)):
            checker.check_tiles(size, 4, heads)
    check_proofs(mask, grid, facts)


def check_proofs(mask: Node, grid: Grid, facts: MaskFacts) -> None:
    live = grid.mask(mask)
    if facts.rows_safe.holds and all(bool(grid.value(given)) for given in facts.rows_safe.assumptions):
        assert live.any(-1).all(), "a row that was proven safe has no live key"
    if facts.contiguous.holds:
        starts = (live.int().diff(dim=-1, prepend=torch.zeros_like(live[..., :1].int())) == 1).sum(-1)
        assert (starts <= 1).all(), "a row that was proven contiguous has two intervals"


def visits(mask: Node, grid: Grid, axis: Axis, size: int = 4, columns: int = 4, heads: int = 1) -> Visits:
    """Count visited and ideal tiles along one direction."""
    facts = analyse_mask(Graph("mask", "mask", mask))
    direction = facts.kv if axis is Axis.KV else facts.q
    return Checker(mask, direction, axis, grid).check_tiles(size, columns, heads)
