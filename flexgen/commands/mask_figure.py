"""What a picture of a mask shows, as plain values: a painted grid, the bounds drawn over it, and its texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexgen.commands.mask_subject import MaskSubject
from flexgen.commands.tile_map import Live, TileMap, Visit, count_pairs
from flexgen.ir.graph import Node
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.facts import Direction
from flexgen.lowering.intervals import RowSegment
from flexgen.lowering.symbols import TRUE

Color = tuple[int, int, int]

# Blues by how much is live and orange for waste: told apart by hue with every kind of colour vision, and by lightness
# in print. A pixel of a partial tile lies between its two blues, by the share of its pairs that are live.
EMPTY: Color = (240, 240, 240)
PARTIAL: Color = (198, 219, 239)
LIVE: Color = (49, 130, 189)
FULL: Color = (8, 48, 107)
NEEDLESS: Color = (230, 97, 0)

MAX_TILES = 512  # a side; more are joined
_MAX_PIXELS = 512  # a side, inside of the tiles
_MAX_BOUND_ROWS = 1024
_SHARE_EXPONENT = 0.5  # below 1, so that single live pairs can be seen
_MAX_LABEL = 34


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A colour, or two of which the second is drawn inside of the first, and what it stands for."""

    color: Color
    label: str
    inner: Color | None = None


@dataclass(frozen=True, slots=True)
class BoundLine:
    """One end of a segment as a function of the query.

    Attributes:
        segment: which one of several, as "2: "; empty where there is one.
        is_start: the line is lo(q), else hi(q).
        exact: the row's live keys are exactly the interval; else they lie in it.
        queries: int64 [n + 1], ascending: value i holds for queries [queries[i], queries[i + 1]).
        keys: float64 [n], NaN where the segment is empty.
        label: the end, in the user's names.
    """

    segment: str
    is_start: bool
    exact: bool
    queries: Tensor
    keys: Tensor
    label: str


@dataclass(frozen=True, slots=True)
class MaskFigure:
    """A picture of one batch and query head of a mask.

    Attributes:
        name, tier, because: of the title: what the mask is called, its tier, and the interval or why there is none.
        pixels: uint8 [rows, columns, 3].
        row_span, column_span: queries and keys that a pixel covers; the last ones may reach beyond the lengths.
        q_len, kv_len: tokens of the axes.
        tile_rows, tile_columns: queries and keys of a tile.
        lines: the bounds.
        legend: the colours, with counts.
        notes: lines below the legend.
    """

    name: str
    tier: str
    because: str
    pixels: Tensor
    row_span: int
    column_span: int
    q_len: int
    kv_len: int
    tile_rows: int
    tile_columns: int
    lines: tuple[BoundLine, ...]
    legend: tuple[LegendEntry, ...]
    notes: tuple[str, ...]


def mask_figure(name: str, mask: MaskSubject, tiles: TileMap, keys: Direction) -> MaskFigure:
    """Describe the picture of a mask.

    Args:
        name: what the mask is called.
        keys: what is known of a query's keys.
    """
    painted = _paint(mask, tiles)
    return MaskFigure(
        name,
        keys.tier.value,
        keys.because,
        painted.colors,
        painted.row_span,
        painted.column_span,
        mask.shape.Lq,
        mask.shape.Lk,
        tiles.rows,
        tiles.columns,
        tuple(_lines(mask, keys)),
        tuple(_legend(tiles)),
        tuple(_notes(mask, tiles, painted)),
    )


# Painting.


@dataclass(frozen=True, slots=True)
class _Pixels:
    """uint8 [rows, columns, 3], and how many queries and keys a pixel covers."""

    colors: Tensor
    row_span: int
    column_span: int


def _paint(mask: MaskSubject, tiles: TileMap) -> _Pixels:
    """Paint whole tiles, or finer where the pairs can all be evaluated; then join pixels that are too many."""
    rows, columns = tiles.rows, tiles.columns
    if not tiles.proven:
        rows, columns = _finer(rows, mask.shape.Lq), _finer(columns, mask.shape.Lk)
    share = _share(mask, tiles, rows, columns)
    height, width = share.shape
    kinds = _kinds(tiles).repeat_interleave(tiles.rows // rows, 0).repeat_interleave(tiles.columns // columns, 1)
    colors = _mixed(kinds[:height, :width], share)
    joined_rows, joined_columns = (
        joined_tiles(length) if span == tile else 1
        for length, span, tile in zip(tiles.visits.shape, (rows, columns), (tiles.rows, tiles.columns), strict=True)
    )
    return _Pixels(_joined(colors, joined_rows, joined_columns), rows * joined_rows, columns * joined_columns)


def joined_tiles(tiles: int) -> int:
    """Return how many tiles, one way, a picture shows as one."""
    return -(-tiles // MAX_TILES)


def _finer(tile: int, length: int) -> int:
    """Return the smallest divisor of a tile's side for which the pixels of an axis are not too many."""
    return next((d for d in range(1, tile) if tile % d == 0 and length <= d * _MAX_PIXELS), tile)


def _share(mask: MaskSubject, tiles: TileMap, rows: int, columns: int) -> Tensor:
    """Return float [pixel rows, pixel columns]: how much of each pixel is live."""
    if (rows, columns) == (tiles.rows, tiles.columns):
        return tiles.pairs / tiles.sizes
    pairs = count_pairs(mask, rows, columns)
    high, wide = (
        (length - torch.arange(0, length, span)).clamp(max=span)
        for length, span in ((mask.shape.Lq, rows), (mask.shape.Lk, columns))
    )
    return pairs / (high[:, None] * wide[None, :])


_KINDS = (EMPTY, NEEDLESS, PARTIAL, FULL)


def _kinds(tiles: TileMap) -> Tensor:
    """Return an index into `_KINDS` for each tile."""
    kinds = torch.where(tiles.visits == Visit.UNMASKED, 3, torch.where(tiles.pairs == 0, 1, 2))
    return torch.where(tiles.visits == Visit.SKIPPED, 0, kinds)


def _mixed(kinds: Tensor, share: Tensor) -> Tensor:
    """Return float [rows, columns, 3], 0 to 255; where the mask is applied, between the blues by the live share."""
    colors = torch.tensor(_KINDS, dtype=torch.float32)[kinds]
    live = torch.where(kinds == _KINDS.index(PARTIAL), share.float() ** _SHARE_EXPONENT, 0.0)[..., None]
    return colors + live * (torch.tensor(LIVE) - torch.tensor(PARTIAL))


def _joined(colors: Tensor, rows: int, columns: int) -> Tensor:
    """Average the colours of groups of pixels; where the last group is short, of those that exist."""
    high, wide, _ = colors.shape
    padded = pad(torch.cat([colors, torch.ones(high, wide, 1)], 2), (0, 0, 0, -wide % columns, 0, -high % rows))
    groups = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns, 4).sum((1, 3))
    return (groups[..., :3] / groups[..., 3:]).round().to(torch.uint8)


# Bounds.


def _lines(mask: MaskSubject, keys: Direction) -> Iterator[BoundLine]:
    """Yield the ends of each segment; of one that only holds the live keys, those that tell something."""
    queries = torch.arange(0, mask.shape.Lq, -(-mask.shape.Lq // _MAX_BOUND_ROWS))
    segments = keys.rows.segments
    for number, segment in enumerate(segments, 1):
        lines = _ends(mask, segment, queries, f"{number}: " if len(segments) > 1 else "")
        tells = (segment.outer.lo is not None, segment.outer.hi is not None)
        yield from (line for line, told in zip(lines, tells, strict=True) if told or segment.is_exact)


def _ends(mask: MaskSubject, segment: RowSegment, queries: Tensor, number: str) -> Iterator[BoundLine]:
    outer = segment.outer
    lo = _at_queries(mask, outer.lo, queries, 0)
    hi = _at_queries(mask, outer.hi, queries, mask.shape.Lk)
    live = lo < hi
    if outer.guard is not TRUE:
        live &= mask.value(outer.guard, {"q_idx": queries}).expand(len(queries))
    edges = torch.cat([queries, torch.tensor([mask.shape.Lq])])
    for keys, node, is_start in ((lo, outer.lo, True), (hi, outer.hi, False)):
        drawn = torch.where(live, keys.double(), torch.nan)
        yield BoundLine(number, is_start, segment.is_exact, edges, drawn, _end_label(node, is_start))


def _at_queries(mask: MaskSubject, node: Node | None, queries: Tensor, default: int) -> Tensor:
    value = torch.tensor(default) if node is None else mask.value(node, {"q_idx": queries})
    return value.clamp(0, mask.shape.Lk).expand(len(queries))


def _end_label(node: Node | None, is_start: bool) -> str:
    if node is None:
        return "0" if is_start else "KV_LEN"
    text = expression_text(node)
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 4] + " ..."


# Texts.


def _legend(tiles: TileMap) -> Iterator[LegendEntry]:
    whole = tiles.count(Visit.CHECKED, Live.FULL)
    yield LegendEntry(FULL, f"full, without the mask: {_share_text(tiles, tiles.count(Visit.UNMASKED))}")
    partial = _share_text(tiles, tiles.count(Visit.CHECKED, Live.PARTIAL) + whole)
    yield LegendEntry(PARTIAL, f"partial, mask applied: {partial}", LIVE)
    if whole:
        yield LegendEntry(LIVE, f"    of them live in full: {_share_text(tiles, whole)}")
    if tiles.needless:
        yield LegendEntry(NEEDLESS, f"visited in vain: {_share_text(tiles, tiles.needless)}")
    yield LegendEntry(EMPTY, f"empty, skipped: {_share_text(tiles, tiles.count(Visit.SKIPPED))}")


def _share_text(tiles: TileMap, number: int) -> str:
    return f"{number:,} ({number / max(tiles.count(), 1):.1%})"


def _notes(mask: MaskSubject, tiles: TileMap, painted: _Pixels) -> Iterator[str]:
    total = tiles.count()
    visited = total - tiles.count(Visit.SKIPPED)
    yield f"{visited:,} of {total:,} tiles are visited ({visited / max(total, 1):.1%})"
    yield f"a tile is {tiles.rows} queries x {tiles.columns} keys"
    yield "in partial tiles, live pairs are darker"
    yield f"{int(tiles.pairs.sum()) / max(mask.shape.Lq * mask.shape.Lk, 1):.1%} of the pairs are live"
    yield f"batch {mask.place.b}, query head {mask.place.h}"
    if painted.row_span > tiles.rows or painted.column_span > tiles.columns:
        high, wide = painted.row_span // tiles.rows, painted.column_span // tiles.columns
        yield f"a pixel is {max(high, 1)} x {max(wide, 1)} tiles, their colours mixed"
