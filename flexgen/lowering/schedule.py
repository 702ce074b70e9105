"""Which key tiles a query tile visits, and which of them need the mask: the plan's schedule."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.facts import MaskFacts
from flexgen.lowering.symbols import KV_LEN, ZERO


class Walk(enum.Enum):
    """How a kernel finds its key tiles."""

    RANGES = "ranges"  # loops over [lo, hi) computed in the kernel
    TABLE = "table"  # block lists read from memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """The walk of one direction.

    Attributes:
        walk: ranges or table.
        segments: for ranges; visited in order, made disjoint at tile granularity by the kernel.
        sorted: the segments' lower bounds are known to ascend; else the kernel orders them at run time.
        because: the reason, for people.
    """

    walk: Walk
    segments: tuple[SegmentBounds, ...]
    sorted: bool
    because: str


def forward_schedule(facts: MaskFacts, *, table: bool, trusted: bool) -> Schedule:
    """Return the walk of a tile of queries over its keys.

    Args:
        facts: what is proven about the mask.
        table: the call brings a block table, whose lists alone say what is visited.
        trusted: the launch's scalars lie in the ranges that the facts were derived for.
    """
    if table:
        return Schedule(Walk.TABLE, (), True, "the block mask's lists say which blocks are visited")
    if not trusted:
        return Schedule(Walk.RANGES, (_every_key(),), True, "a captured number is too large for the mask's bounds")
    tier = facts.kv.tier
    return Schedule(Walk.RANGES, facts.kv.segments, facts.kv.sorted, f"{tier.value}: {facts.kv.because}")


def _every_key() -> SegmentBounds:
    return SegmentBounds(Bound(ZERO), Bound(KV_LEN), None, None, False, "every key is visited and checked")
