"""Plots of the report as plain values: axes with ticks, lines and areas, in the coordinates of an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 80, 18, 14, 46


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, in the picture's coordinates, and its label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A path and the class that styles it; `title` is told where it is pointed at."""

    path: str
    style: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point, and what it stands for, told below the picture under its number.

    Attributes:
        numbers: what is written beside it: its own, and those of the points that lie there too; "" beside one of them.
        below: the numbers stand below it, not above.
    """

    x: float
    y: float
    label: str
    style: str
    numbers: str = ""
    below: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Attributes:
        title, caption: above and below it.
        summary: what it shows, in words, for those who do not see it.
        x_label, y_label: of the axes.
        legend: (style, label) of lines that need one.
        has_grid: lines at the ticks; none below a picture that fills the plot.
    """

    title: str
    caption: str
    summary: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    shapes: tuple[Shape, ...]
    marks: tuple[Mark, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    has_grid: bool = True
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM


@dataclass(frozen=True, slots=True)
class Scale:
    """A map from values to the picture: linear, or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.logarithmic else (self.low, self.high)
        value = math.log(value) if self.logarithmic else value
        share = (value - low) / (high - low) if high != low else 0.5
        return round(self.start + share * (self.end - self.start), 2)


def x_scale(low: float, high: float, *, logarithmic: bool = False) -> Scale:
    return Scale(low, high, LEFT, WIDTH - RIGHT, logarithmic)


def y_scale(low: float, high: float, *, logarithmic: bool = False, height: int = HEIGHT) -> Scale:
    return Scale(low, high, height - BOTTOM, TOP, logarithmic)


def padded(values: Iterable[float]) -> tuple[float, float]:
    """Return ends a little beyond finite values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.06 or max(abs(high), 1.0) * 0.1
    return low - room, high + room


def linear_ticks(scale: Scale, count: int = 6) -> tuple[Tick, ...]:
    """Return ticks at round values."""
    raw = (scale.high - scale.low) / count
    if raw <= 0:
        return (Tick(scale.at(scale.low), number_text(scale.low)),)
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
    first = math.ceil(scale.low / step)
    values = [number * step for number in range(first, math.floor(scale.high / step) + 1)]
    return tuple(Tick(scale.at(value), number_text(value)) for value in values)


def numbered(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Number points from 1, those that lie together at the first of them, and neighbours above and below in turn."""
    together: dict[int, list[int]] = {}
    for number, mark in enumerate(marks, 1):
        near = (first for first in together if _is_near(marks[first - 1], mark))
        together.setdefault(next(near, number), []).append(number)
    placed = sorted(together, key=lambda first: marks[first - 1].x)
    found = list(marks)
    for place, first in enumerate(placed):
        text = ", ".join(map(str, together[first]))
        found[first - 1] = replace(marks[first - 1], numbers=text, below=place % 2 == 1)
    return tuple(found)


def _is_near(one: Mark, other: Mark) -> bool:
    return abs(one.x - other.x) < 12 and abs(one.y - other.y) < 12


def number_text(value: float) -> str:
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}")


def line_path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """Return a line through points; it is broken where a value is not finite."""
    parts: list[str] = []
    pen_down = False
    for at, value in points:
        if math.isfinite(value):
            parts.append(f"{'L' if pen_down else 'M'}{x.at(at):g} {y.at(value):g}")
        pen_down = math.isfinite(value)
    return "".join(parts)
