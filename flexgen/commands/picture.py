"""Draws a map of tiles with one character a tile, or a square of tiles where there are too many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexgen.commands.console import Span
from flexgen.commands.tile_map import Live, TileMap, Visit

MAX_COLUMNS, MAX_ROWS = 88, 44

# What a character stands for. A tile that is live in full and still checked is drawn as checked.
UNMASKED, CHECKED, NEEDLESS, SKIPPED = "#", "+", "o", "."
LEGEND = (
    (UNMASKED, "full: computed without the mask"),
    (CHECKED, "partial: computed with the mask"),
    (NEEDLESS, "empty, but visited"),
    (SKIPPED, "empty: never visited"),
)


def draw(tiles: TileMap) -> Iterator[list[Span]]:
    """Yield the lines of the picture: queries downwards, keys to the right."""
    side = shrink(tiles)
    cells = _characters(tiles)
    for row in _grouped(cells, side):
        yield [Span("  "), *(Span(mark, _STYLES[mark]) for mark in row)]  # type: ignore[arg-type]


_STYLES = {UNMASKED: "green", CHECKED: "yellow", NEEDLESS: "red", SKIPPED: "dim"}
_MARKS = (SKIPPED, NEEDLESS, CHECKED, UNMASKED)


def shrink(tiles: TileMap) -> int:
    """Return how many tiles, each way, one character stands for."""
    rows, columns = tiles.live.shape
    return max(1, -(-rows // MAX_ROWS), -(-columns // MAX_COLUMNS))


def _characters(tiles: TileMap) -> Tensor:
    """Return an index into `_MARKS` for each tile."""
    marks = torch.where(tiles.visits == Visit.UNMASKED, 3, torch.where(tiles.live == Live.EMPTY, 1, 2))
    return torch.where(tiles.visits == Visit.SKIPPED, 0, marks)


def _grouped(cells: Tensor, side: int) -> Iterator[str]:
    """Join squares of tiles: alike ones keep their mark, mixed ones are partial."""
    rows, columns = cells.shape
    padded = pad(cells, (0, -columns % side, 0, -rows % side), value=-1)
    squares = padded.unfold(0, side, side).unfold(1, side, side).flatten(2)
    high = squares.amax(-1)
    low = torch.where(squares < 0, 3, squares).amin(-1)
    joined = torch.where(low == high, high, 2)
    for row in joined.tolist():
        yield "".join(_MARKS[mark] for mark in row)
