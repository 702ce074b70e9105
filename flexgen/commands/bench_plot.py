"""Draws the speeds of `flexgen bench` as bars with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexgen.commands.bench_rows import BenchRow
from flexgen.commands.mask_plot import format_of
from flexgen.errors import FlexgenError

_COLORS = {"flexgen": "#1f77b4", "flex": "#ff7f0e", "cudnn": "#2ca02c", "eager": "#7f7f7f"}
_BAR = 0.8  # of the space between directions, for all its bars


def save_bars(rows: Sequence[BenchRow], title: str, path: Path) -> None:
    """Write a picture with a group of bars for each direction, one a contender, in TFLOP/s over live pairs.

    Raises:
        FlexgenError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # optional

    directions = list(dict.fromkeys(row.direction for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows if row.times))
    figure = Figure(figsize=(2.2 + 1.9 * len(directions), 3.6), layout="constrained")
    axes = figure.subplots()
    width = _BAR / max(len(contenders), 1)
    for place, name in enumerate(contenders):
        speeds = {row.direction: row.tflops or 0.0 for row in rows if row.contender == name}
        at = [number + (place - (len(contenders) - 1) / 2) * width for number in range(len(directions))]
        heights = [speeds.get(direction, 0.0) for direction in directions]
        bars = axes.bar(at, heights, width, label=name, color=_COLORS.get(name))
        axes.bar_label(bars, [f"{height:.3g}" if height else "" for height in heights], fontsize=8)
    axes.set_xticks(range(len(directions)), directions)
    axes.set_ylabel("TFLOP/s over live pairs")
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, format=format_of(path), dpi=150)
    except OSError as error:
        raise FlexgenError(f"cannot write {path}: {error.strerror}", fix="give --output a file of your own") from error
