"""Which key tiles a query tile visits, and which of them need the mask: the plan's schedule."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.facts import MaskFacts
from flexgen.lowering.symbols import KV_LEN, Q_LEN, ZERO
from flexgen.problem import TableForm


class Walk(enum.Enum):
    """How a kernel finds its key tiles."""

    RANGES = "ranges"  # loops over [lo, hi) computed in the kernel
    TABLE = "table"  # block lists read from memory
    DERIVED = "derived table"  # one compact list, which other kernels derived from the mask


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


def forward_schedule(facts: MaskFacts, *, table: TableForm | None, trusted: bool, without_table: str = "") -> Schedule:
    """Return the walk of a tile of queries over its keys.

    Args:
        facts: what is proven about the mask.
        table: the block table that the call brings or that is derived for it, if any.
        trusted: the launch's scalars lie in the ranges that the facts were derived for.
        without_table: why no table is derived, where the mask's tier would have one.
    """
    if table is not None and table.derived:
        sizes = f"{table.q_block_size} x {table.kv_block_size}"
        return Schedule(Walk.DERIVED, (), True, f"{sizes} blocks, listed on the device: {facts.kv.because}")
    if table is not None:
        return Schedule(Walk.TABLE, (), True, "the block mask's lists say which blocks are visited")
    if not trusted:
        return Schedule(Walk.RANGES, (_every_key(),), True, "a captured number is too large for the mask's bounds")
    tier = facts.kv.tier
    because = f"{tier.value}: {facts.kv.because}" + (f"; no table: {without_table}" if without_table else "")
    return Schedule(Walk.RANGES, facts.kv.segments, facts.kv.sorted, because)


def backward_schedule(facts: MaskFacts, walks_keys: bool, table: TableForm | None, *, trusted: bool) -> Schedule:
    """Return the walk of a backward kernel: of a tile of queries over keys, or of a tile of keys over queries.

    Args:
        table: of the forward; where that is derived, each kernel walks one of its own.
    """
    way = facts.kv if walks_keys else facts.q
    if table is not None and table.derived:
        return Schedule(Walk.DERIVED, (), True, f"blocks as its tiles, listed on the device: {way.because}")
    if table is not None:
        return Schedule(Walk.TABLE, (), True, "the block mask's lists say which blocks are visited")
    if not trusted:
        everything = _every_key() if walks_keys else _every_query()
        return Schedule(Walk.RANGES, (everything,), True, "a captured number is too large for the mask's bounds")
    return Schedule(Walk.RANGES, way.segments, way.sorted, f"{way.tier.value}: {way.because}")


def _every_key() -> SegmentBounds:
    return SegmentBounds(Bound(ZERO), Bound(KV_LEN), None, None, False, "every key is visited and checked")


def _every_query() -> SegmentBounds:
    return SegmentBounds(Bound(ZERO), Bound(Q_LEN), None, None, False, "every query is visited and checked")
