"""Draws a `MaskFigure` with matplotlib, as PNG or SVG: one description, two formats."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flexgen.commands.mask_figure import BoundLine, Color, LegendEntry, MaskFigure
from flexgen.errors import FlexgenError, OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = ("png", "svg")

_STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,  # names may hold a dollar sign
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "svg.hashsalt": "flexgen",  # so that equal pictures are equal files
    "axes.edgecolor": "#666666",
    "path.simplify_threshold": 0.3,  # of a pixel: points on a straight line are left out
}
_DPI = 100
# Inches.
_PLOT, _LEFT, _RIGHT, _GAP, _TOP, _BOTTOM, _LINE = 5.2, 0.85, 3.25, 0.2, 0.55, 0.18, 0.165
_LEGEND_LINE = 0.215
_TITLE_CHARACTERS = 118
_MAX_GRID = 48  # tiles a side of which each is outlined
_MANY_TILES = 320  # a side, beyond which a thick line would hide several
_MAX_STEPS = 256  # down the picture: more are about a pixel each
_INK, _DIM = "#1a1a1a", "#555555"


def format_of(path: Path) -> Format:
    """Return the format that a file's name asks for.

    Raises:
        OptionError: it ends in something else.
    """
    suffix = path.suffix.lower().removeprefix(".")
    for known in FORMATS:
        if suffix == known:
            return known
    raise OptionError(f"{path} is neither a .png nor an .svg file", fix="name it so, or use --png FILE or --svg FILE")


def require_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        FlexgenError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FlexgenError(
            "a picture needs matplotlib, which is not installed", fix="pip install flexgen[plot]"
        ) from error


def save(picture: MaskFigure, path: Path, kind: Format) -> None:
    """Write the picture.

    Raises:
        FlexgenError: the file cannot be written.
    """
    from matplotlib import rc_context

    metadata = {"Title": f"{picture.name}: {picture.tier}"}
    metadata |= {"Software": "flexgen"} if kind == "png" else {"Creator": "flexgen", "Date": None}  # type: ignore[dict-item]
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = _figure(picture, kind)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format=kind, dpi=_DPI, metadata=metadata)
        except OSError as error:
            raise FlexgenError(f"cannot write {path}: {error.strerror}", fix="name a file of your own") from error


def _figure(picture: MaskFigure, kind: Format) -> Figure:
    from matplotlib.figure import Figure

    because = textwrap.wrap(picture.because, _TITLE_CHARACTERS, max_lines=3, placeholder=" ...")
    top = _TOP + 0.6 + _LINE * len(because)
    tall = _PLOT * min(max(picture.q_len / picture.kv_len, 0.4), 1.6)
    beside = _LEGEND_LINE * len((*picture.legend, *picture.lines, *picture.notes))
    width, height = _LEFT + _PLOT + _GAP + _RIGHT, top + max(tall, beside) + _BOTTOM
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.text(0.14 / width, 1 - 0.14 / height, picture.name, va="top", size=13, weight="bold", color=_INK)
    figure.text(0.14 / width, 1 - 0.42 / height, picture.tier, va="top", size=10, color=_INK)
    figure.text(0.14 / width, 1 - 0.63 / height, "\n".join(because), va="top", size=9, color=_DIM, linespacing=1.3)
    axes = figure.add_axes((_LEFT / width, 1 - (top + tall) / height, _PLOT / width, tall / height))
    # A vector format keeps the pixels as they are; a raster one has pixels of its own, so it has to mix them.
    _draw_tiles(axes, picture, "none" if kind == "svg" else "antialiased")
    many = max(picture.q_len // picture.tile_rows, picture.kv_len // picture.tile_columns) > _MANY_TILES
    for line in picture.lines:
        _draw_line(axes, line, 0.8 if many else 1.5)
    _draw_axes(axes, picture)
    _draw_legend(axes, picture)
    return figure


def _draw_tiles(axes: Axes, picture: MaskFigure, interpolation: str) -> None:
    rows, columns, _ = picture.pixels.shape
    extent = (0.0, float(columns * picture.column_span), float(rows * picture.row_span), 0.0)
    axes.imshow(picture.pixels.numpy(), extent=extent, interpolation=interpolation, aspect="auto")
    grid: dict[str, Any] = {"color": "white", "linewidth": 0.7, "zorder": 1.5}
    if -(-picture.q_len // picture.tile_rows) <= _MAX_GRID:
        axes.hlines(range(picture.tile_rows, picture.q_len, picture.tile_rows), 0, picture.kv_len, **grid)
    if -(-picture.kv_len // picture.tile_columns) <= _MAX_GRID:
        axes.vlines(range(picture.tile_columns, picture.kv_len, picture.tile_columns), 0, picture.q_len, **grid)


def _draw_line(axes: Axes, line: BoundLine, width: float) -> None:
    """Draw an end as steps, each from the top of its queries to their bottom; or straight, where steps are tiny."""
    from matplotlib.patheffects import withStroke

    keys, queries = line.keys.numpy(), line.queries.numpy()
    if len(keys) <= _MAX_STEPS:
        keys, queries = np.repeat(keys, 2), np.repeat(queries, 2)[1:-1]
    else:
        keys = np.append(keys, keys[-1])
    axes.plot(
        keys,
        queries,
        color=_INK,
        linewidth=width,
        linestyle=_dashes(line),
        path_effects=[withStroke(linewidth=2 * width, foreground="white")],
        solid_joinstyle="miter",
        clip_on=False,
        zorder=3,
    )


def _dashes(line: BoundLine) -> Any:
    return (0, (4, 1.6)) if line.is_start else "-"


def _draw_axes(axes: Axes, picture: MaskFigure) -> None:
    axes.set_xlim(0, picture.kv_len)
    axes.set_ylim(picture.q_len, 0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("kv_idx (tokens)", color=_INK, labelpad=5)
    axes.set_ylabel("q_idx (tokens)", color=_INK, labelpad=4)
    axes.set_xticks(_ticks(picture.kv_len, picture.tile_columns))
    axes.set_yticks(_ticks(picture.q_len, picture.tile_rows))
    axes.tick_params(length=3, colors=_DIM, labelsize=8)


def _ticks(length: int, tile: int) -> list[int]:
    """Return edges of tiles, at most nine, and the end of the axis."""
    step = tile
    while length > 8 * step:
        step *= 2
    inner = [place for place in range(0, length, step) if length - place > 0.4 * step]
    return [*inner, length]


def _draw_legend(axes: Axes, picture: MaskFigure) -> None:
    """Draw colours, bounds and notes as one list, so that they stay apart however many there are."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [_swatch(entry) for entry in picture.legend]
    handles += [Line2D([], [], color=_INK, linewidth=1.5, linestyle=_dashes(line)) for line in picture.lines]
    legend = axes.legend(
        [*handles, *(Line2D([], [], linestyle="none") for _ in picture.notes)],
        [entry.label for entry in picture.legend] + [_line_label(line) for line in picture.lines] + [*picture.notes],
        loc="upper left",
        bbox_to_anchor=(1 + _GAP / _PLOT, 1.0),
        borderaxespad=0,
        borderpad=0,
        frameon=False,
        labelspacing=0.55,
        handlelength=1.8,
    )
    for text in legend.get_texts()[len(handles) :]:
        text.set_color(_DIM)


def _swatch(entry: LegendEntry) -> Any:
    """Return a filled square; of two colours, with the inner one as stripes."""
    from matplotlib.patches import Patch

    if entry.inner is None:
        return Patch(facecolor=_hex(entry.color), edgecolor="#bbbbbb", linewidth=0.5)
    return Patch(facecolor=_hex(entry.color), edgecolor=_hex(entry.inner), linewidth=0, hatch="/////")


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)


def _line_label(line: BoundLine) -> str:
    """A bound that is not exact lies outside of the live keys."""
    relation = "=" if line.exact else "≥" if line.is_start else "≤"
    return f"{line.segment}{'lo' if line.is_start else 'hi'}(q) {relation} {line.label}"
