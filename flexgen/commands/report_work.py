"""The roofline of the report: what the chip's units allow at each intensity, and where the kernels stand."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen.commands.report_plot import Mark, Plot, Scale, Shape, Tick, line_path, numbered, x_scale, y_scale
from flexgen.explain_work import quantity
from flexgen.work import Bound, Work

_HEADROOM = 2.5  # above the roof, for the numbers of points on it
_BOUND_BY = {"matrix unit": "the matrix unit", "memory": "memory", "exponentials": "exponentials"}


def roofline(works: Sequence[Work]) -> Plot | None:
    """Return the roofline of kernels on one chip; None where no rates are known or nothing is computed."""
    shown = [work for work in works if work.bound is not None and work.chip is not None]
    if not shown:
        return None
    chip = shown[0].chip
    assert chip is not None
    memory, matrix = _of(shown[0], "memory").rate, max(_of(work, "matrix unit").rate for work in shown)
    balance = matrix / memory
    intensities = [work.intensity for work in shown]
    x = x_scale(_decade(min(*intensities, balance), -1), _decade(max(*intensities, balance), 1), logarithmic=True)
    reached = [work.flops / work.bound.seconds for work in shown if work.bound]
    y = y_scale(_decade(min(*reached, x.low * memory), 0), _HEADROOM * matrix, logarithmic=True)
    roof = [(x.low, max(x.low * memory, y.low)), (balance, matrix), (x.high, matrix)]
    if x.low * memory < y.low:
        roof[0] = (y.low / memory, y.low)
    used = shown[0].multiprocessors_used
    idle = f" Only {used:.0%} of its multiprocessors have a program of the forward." if used < 1 else ""
    names = ", ".join(f"{work.kernel} {quantity(value, 'FLOP/s')}" for work, value in zip(shown, reached, strict=True))
    return Plot(
        title=f"Roofline of {chip.name}",
        caption=f"Memory passes {quantity(memory, 'B/s')}, the matrix unit computes {quantity(matrix, 'FLOP/s')}."
        f"{idle} No kernel can be above its point, where the unit named is busy all the time.",
        summary=f"Roofline. At most: {names}.",
        x_label="intensity, FLOP for each byte of memory",
        y_label="FLOP/s",
        x_ticks=_decades(x, ""),
        y_ticks=_decades(y, ""),
        shapes=(Shape(line_path(roof, x, y), "curve roof"),),
        marks=numbered(
            [
                _mark(work, value, x, y, "abcd"[number % 4])
                for number, (work, value) in enumerate(zip(shown, reached, strict=True))
            ]
        ),
    )


def _mark(work: Work, reached: float, x: Scale, y: Scale, style: str) -> Mark:
    assert work.bound is not None
    label = f"{work.kernel}: {quantity(reached, 'FLOP/s')} at most, bound by {_BOUND_BY[work.bound.unit]}"
    return Mark(x.at(work.intensity), y.at(reached), label, style)


def _of(work: Work, unit: str) -> Bound:
    return next(bound for bound in work.bounds if bound.unit == unit)


def _decade(value: float, steps: int) -> float:
    """Return the power of ten at or below a value, or above it, some steps further."""
    exponent = 0
    while 10.0 ** (exponent + 1) <= value:
        exponent += 1
    while 10.0**exponent > value:
        exponent -= 1
    return float(10.0 ** (exponent + steps))


def _decades(scale: Scale, unit: str) -> tuple[Tick, ...]:
    ticks, value = [], scale.low
    while value <= scale.high * 1.001:
        ticks.append(Tick(scale.at(value), quantity(value, unit)))
        value *= 10
    return tuple(ticks)
