"""How many neighbouring queries share the ends of their key ranges, where a table gives those ends."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flexgen.ir.graph import Axis, Node, topological
from flexgen.lowering.schedule import Schedule, Walk

SMALLEST_TILE = 32  # rows; kernels for matrix units have no smaller ones that are fast


def rows_of_one_range(schedule: Schedule) -> int | None:
    """Return C, at least 32, where the ends of ranges are read at `q_idx // C`; else None.

    A tile of C aligned rows then has one range. A larger one visits all between the ranges of several groups, which may
    lie anywhere: `selected[q_idx // 64]` need not ascend. Ends that are read at each query are taken to ascend with
    it, as those of documents do.
    """
    if schedule.walk is not Walk.RANGES:
        return None
    bounds = (bound for segment in schedule.segments for bound in segment.bounds if bound.reduce is not None)
    sizes = {size for bound in bounds for size in _groups(bound.node)}
    known = [size for size in sizes if size is not None]
    common = math.gcd(*known) if len(known) == len(sizes) else 0
    return common if common >= SMALLEST_TILE else None


def _groups(node: Node) -> Iterator[int | None]:
    """Yield the group size of each load at an index that depends on the query; None where it is not a group's."""
    for load in topological(node):
        if load.op == "load":
            yield from (_group(index) for index in load.args if Axis.Q in index.axes)


def _group(index: Node) -> int | None:
    while index.op == "cast":
        index = index.args[0]
    if index.op != "floordiv":
        return None
    row, size = index.args
    while row.op == "cast":
        row = row.args[0]
    is_row = row.op == "input" and row.attr == "q_idx"
    return size.attr if is_row and size.op == "const" and isinstance(size.attr, int) else None
