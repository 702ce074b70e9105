"""How a kernel calls its inner loop: runs of tiles that need the mask, and runs that do not, each in one loop."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flexgen.codegen.bounds_printer import SegmentNames


@dataclass(frozen=True, slots=True)
class Checked:
    """A text for steps that apply the mask, and one for steps that need not."""

    checked: str
    unchecked: str


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles [lo, hi), by the names of their bounds."""

    lo: str
    hi: str


@dataclass(frozen=True, slots=True)
class Walk:
    """Runs of tiles, ascending, that one loop visits; `checked` tiles apply the mask."""

    checked: bool
    runs: tuple[Run, ...]


def walks_of(segments: Sequence[SegmentNames], *, masked: bool) -> tuple[Walk, ...]:
    """Return the loops over segments: full tiles first, then those that need the mask.

    Args:
        masked: tiles outside of the full ranges need a check at all.
    """
    if not segments:
        return ()
    if not masked or not any(segment.full_hi for segment in segments):
        return (Walk(True, tuple(Run(segment.lo, segment.hi) for segment in segments)),)
    edges: list[Run] = []
    full: list[Run] = []
    for segment in segments:
        if segment.full_lo is None or segment.full_hi is None:
            edges.append(Run(segment.lo, segment.hi))
            continue
        edges += [Run(segment.lo, segment.full_lo)] if segment.left_edge else []
        edges.append(Run(segment.full_hi, segment.hi))
        full.append(Run(segment.full_lo, segment.full_hi))
    return (Walk(False, tuple(full)), Walk(True, tuple(edges)))


def gap_count(walks: Sequence[Walk]) -> int:
    """Return how many gaps between runs the loop must be able to leave out."""
    return max((len(walk.runs) - 1 for walk in walks), default=0)


def span(walk: Walk, gaps: int) -> str:
    """Return the loop's last arguments: first, last, and where each gap starts and how many tiles it has."""
    between = [f"{left.hi}, {right.lo} - {left.hi}" for left, right in itertools.pairwise(walk.runs)]
    between += [f"{walk.runs[-1].hi}, 0"] * (gaps - len(between))
    return ", ".join([walk.runs[0].lo, walk.runs[-1].hi, *between])


def grouped(names: Sequence[str], size: int) -> list[str]:
    """Return names joined into lines of `size`."""
    return [", ".join(names[start : start + size]) for start in range(0, len(names), size)]
