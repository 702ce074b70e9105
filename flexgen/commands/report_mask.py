"""The mask's picture in the report: the state of each tile, as shapes to draw and as data to point at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexgen.commands.report_plot import Tick
from flexgen.commands.tile_map import Live, TileMap, Visit

MAX_TILES = 256  # a side; more are joined to squares
_MOST_SHARES = 40_000  # partial tiles whose live pairs are listed

# Joined tiles of different states show the one that comes last here.
STATES = (
    ("empty", "empty: never visited"),
    ("full", "full: computed without the mask"),
    ("checked", "full, yet computed with the mask"),
    ("partial", "partial: computed with the mask"),
    ("vain", "empty, visited in vain"),
)


@dataclass(frozen=True, slots=True)
class StateShape:
    """All tiles of one state.

    Attributes:
        name: of the state, as in STATES.
        label: what it means.
        path: its tiles as an SVG path, a tile being 1 x 1.
        count: how many tiles, before any were joined.
    """

    name: str
    label: str
    path: str
    count: int


@dataclass(frozen=True, slots=True)
class MaskPicture:
    """The tiles of one head.

    Attributes:
        rows, columns: cells of the picture.
        q_step, kv_step: queries and keys of a cell.
        q_len, kv_len: the lengths.
        side: tiles that a cell joins, each way.
        states: the cells, row by row: runs of (state, length), as an index in STATES.
        live: how many pairs are live in each cell that is partial, in order; empty where they are too many to list.
        shapes: what to draw.
        visited, total: tiles.
    """

    rows: int
    columns: int
    q_step: int
    kv_step: int
    q_len: int
    kv_len: int
    side: int
    states: tuple[tuple[int, int], ...]
    live: tuple[int, ...]
    shapes: tuple[StateShape, ...]
    visited: int
    total: int
    packed_heads: int


@dataclass(frozen=True, slots=True)
class MaskBox:
    """Where a mask's picture and the labels of its axes stand."""

    width: float
    height: float
    left: float
    top: float
    bottom: float
    inner_width: float
    inner_height: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def mask_box(mask: MaskPicture) -> MaskBox:
    """Return the place of a picture: true to the lengths, but no flatter or higher than can be looked at."""
    left, top, right, bottom, width = 78.0, 13.0, 22.0, 46.0, 540.0
    height = round(min(max(width * mask.q_len / mask.kv_len, 64.0), width), 1)
    x_ticks = tuple(Tick(round(left + width * at, 1), label) for at, label in _shares(mask.kv_len))
    count = 5 if height > 200 else 2
    y_ticks = tuple(Tick(round(top + height * at, 1), label) for at, label in _shares(mask.q_len, count))
    return MaskBox(left + width + right, top + height + bottom, left, top, bottom, width, height, x_ticks, y_ticks)


def _shares(length: int, count: int = 5) -> list[tuple[float, str]]:
    """Return evenly spaced places along a length, as shares of it, with their labels."""
    steps = min(count, length + 1) - 1
    places = [length * number // steps for number in range(steps + 1)] if steps else [0]
    return [(place / length, f"{place:,}") for place in places]


def mask_picture(tiles: TileMap, q_len: int, kv_len: int, packed_heads: int) -> MaskPicture:
    """Return the picture of a map of tiles."""
    states = _states(tiles)
    side = max(1, -(-states.shape[0] // MAX_TILES), -(-states.shape[1] // MAX_TILES))
    cells, pairs = _joined(states, side), _summed(tiles.pairs, side)
    partial = cells == 3
    live = pairs[partial].tolist() if int(partial.sum()) <= _MOST_SHARES else []
    counts = torch.bincount(states.flatten(), minlength=len(STATES)).tolist()
    return MaskPicture(
        rows=cells.shape[0],
        columns=cells.shape[1],
        q_step=tiles.rows * side,
        kv_step=tiles.columns * side,
        q_len=q_len,
        kv_len=kv_len,
        side=side,
        states=tuple((state, len(list(run))) for state, run in groupby(cells.flatten().tolist())),
        live=tuple(live),
        shapes=tuple(
            StateShape(name, label, _path(cells == number), counts[number])
            for number, (name, label) in enumerate(STATES)
            if counts[number]
        ),
        visited=tiles.count() - tiles.count(Visit.SKIPPED),
        total=tiles.count(),
        packed_heads=packed_heads,
    )


def _states(tiles: TileMap) -> Tensor:
    """Return an index into STATES for each tile."""
    live, visits = tiles.live, tiles.visits
    states = torch.where(live == Live.EMPTY, 4, torch.where(live == Live.FULL, 2, 3))
    states = torch.where(visits == Visit.UNMASKED, 1, states)
    return torch.where(visits == Visit.SKIPPED, 0, states)


def _joined(states: Tensor, side: int) -> Tensor:
    """Join squares of tiles: alike ones keep their state, others are partial, or in vain where nothing is live."""
    squares = _squares(states, side, -1)
    high, low = squares.amax(-1), torch.where(squares < 0, len(STATES), squares).amin(-1)
    any_live = ((squares > 0) & (squares < 4)).any(-1)
    return torch.where(low == high, high, torch.where(any_live, 3, 4))


def _summed(pairs: Tensor, side: int) -> Tensor:
    return _squares(pairs, side, 0).sum(-1)


def _squares(values: Tensor, side: int, fill: int) -> Tensor:
    rows, columns = values.shape
    padded = pad(values, (0, -columns % side, 0, -rows % side), value=fill)
    return padded.unfold(0, side, side).unfold(1, side, side).flatten(2)


def _path(chosen: Tensor) -> str:
    """Return the chosen cells as one path: a rectangle for each run of a row, equal ones of following rows joined."""
    parts: list[str] = []
    for (start, length), rows in _runs(chosen.tolist()):
        parts += [f"M{start} {first}h{length}v{count}h-{length}z" for first, count in rows]
    return "".join(parts)


def _runs(rows: Sequence[Sequence[bool]]) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Yield each run (start, length), with the (first row, count) of each block of rows that has it."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        start = 0
        for value, cells in groupby(row):
            length = len(list(cells))
            if value:
                blocks = found.setdefault((start, length), [])
                if blocks and sum(blocks[-1]) == number:
                    blocks[-1] = blocks[-1][0], blocks[-1][1] + 1
                else:
                    blocks.append((number, 1))
            start += length
    yield from sorted(found.items())
