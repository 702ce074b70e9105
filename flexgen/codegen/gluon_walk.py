"""How a Hopper kernel's one loop walks key or query ranges: gaps it leaves out, and tiles that need the mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexgen.codegen.bounds_printer import SegmentNames

LINE = 96  # columns of names in a line of parameters


@dataclass(frozen=True, slots=True)
class Gap:
    """Tiles between two segments, which the walk leaves out: where they start and how many they are."""

    start: str
    width: str


def gaps_of(segments: Sequence[SegmentNames]) -> tuple[Gap, ...]:
    pairs = itertools.pairwise(segments)
    return tuple(Gap(left.hi, f"{right.lo} - {left.hi}") for left, right in pairs)


def gap_names(segments: Sequence[SegmentNames]) -> list[str]:
    return [f"{kind}_{n}" for n in range(len(segments) - 1) for kind in ("gap", "width")]


def full_names(segments: Sequence[SegmentNames]) -> list[str]:
    """Return the names of the ends of full ranges, as far as a kernel needs them."""
    found: list[str] = []
    for segment in segments:
        if segment.full_hi is not None:
            found += [str(segment.full_lo)] if _has_left_edge(segment) else []
            found.append(segment.full_hi)
    return found


def outside_of_full(segments: Sequence[SegmentNames]) -> str:
    """Return the condition that a tile lies in no full range, "" where nothing is known to be full."""
    full = [s for s in segments if s.full_hi is not None]
    if len(full) == 1 and len(segments) == 1:
        left = f"(tile < {full[0].full_lo}) | " if _has_left_edge(full[0]) else ""
        right = f"tile >= {full[0].full_hi}"
        return f"{left}({right})" if left else right
    inside = [f"((tile >= {s.full_lo}) & (tile < {s.full_hi}))" for s in full]
    return f"({' | '.join(inside)}) == 0" if inside else ""


def _has_left_edge(segment: SegmentNames) -> bool:
    return segment.full_lo != segment.lo


def lines_of(names: Iterable[str]) -> list[str]:
    """Return names joined into lines that are filled."""
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(name) + 2 <= LINE:
            lines[-1] += f", {name}"
        else:
            lines.append(name)
    return lines
