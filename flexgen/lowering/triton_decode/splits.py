"""Over how many programs a launch splits the keys of a row tile: by what a device runs at once, and the live keys."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.lowering.host_value import host_value
from flexgen.lowering.triton_decode.plan import DecodePlan

LEAST_TILES = 2  # of a split: guess; fewer do not outweigh writing and reading its part
SATURATING = 1.4  # programs of each multiprocessor that together take all of the memory's bandwidth: fitted, see below
MOST_BALANCING, NEGLIGIBLE, PRICE = 8, 0.02, 0.004  # splits; a share of the time; the share that one more split costs
# An H200 ran 512 programs, of which it holds 396, in 0.549 ms, and 2 or 3 splits of each in 0.498 and 0.489 ms: the
# last 116 of one split were too few for its memory (benchmarks/results/decode_h200.md, b32_8k).


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a launch that decide.

    Attributes:
        programs: row tiles of all key heads and batch rows.
        q_len, kv_len: queries, and keys that the cache has room for.
        processors: multiprocessors of the device.
    """

    programs: int
    q_len: int
    kv_len: int
    processors: int


def split_count(plan: DecodePlan, extent: Extent) -> int:
    """Return the number of splits: as many as run at once or keep all busy to the end, each of a few tiles at least.

    It depends on shapes alone, never on kv_lengths or on captured numbers, which change from step to step: one count,
    and so one captured CUDA graph, serves all steps over a cache.
    """
    if plan.SPLIT_KV is not None:
        return plan.SPLIT_KV
    tiles = -(-visited_keys(plan, extent) // plan.BLOCK_N)
    return max(1, min(most_splits(plan, extent), tiles // LEAST_TILES))


def most_splits(plan: DecodePlan, extent: Extent) -> int:
    """Return the number of splits of an unbounded cache."""
    if plan.SPLIT_KV is not None:
        return plan.SPLIT_KV
    programs = max(extent.programs, 1)
    filling = plan.resident * extent.processors // programs
    return filling if filling > 1 else _balancing(programs, plan.held * extent.processors, extent.processors)


def _balancing(programs: int, slots: int, processors: int) -> int:
    """Return the fewest splits whose last wave of programs keeps memory busy; of none does, the best number.

    Args:
        programs: of one split; they fill the device.
        slots: programs that run at once.
    """
    lost = {}
    for splits in range(1, MOST_BALANCING + 1):
        total = programs * splits
        last = (total - 1) % slots + 1
        lost[splits] = max(0.0, SATURATING * processors - last) / total
        if lost[splits] <= NEGLIGIBLE:
            return splits
    return min(lost, key=lambda splits: lost[splits] + splits * PRICE)


def visited_keys(plan: DecodePlan, extent: Extent) -> int:
    """Return how many keys a row tile visits at most, as far as shapes and the mask's constants tell."""
    known = [extent.kv_len]
    if plan.LIVE_KEYS is not None:
        known.append(plan.LIVE_KEYS + extent.q_len - 1)
    ranges = _keys_in_ranges(plan, extent)
    return min([*known, ranges]) if ranges is not None else min(known)


def _keys_in_ranges(plan: DecodePlan, extent: Extent) -> int | None:
    """Return the keys in the schedule's ranges; None where they depend on more than shapes."""
    names = {"q_lo": 0, "q_hi": extent.q_len - 1, "Q_LEN": extent.q_len, "KV_LEN": extent.kv_len}
    total = 0
    for segment in plan.schedule.segments:
        lo, hi = (host_value(bound.node, names) for bound in (segment.visit_lo, segment.visit_hi))
        if lo is None or hi is None:
            return None
        total += int(max(0, min(hi, extent.kv_len) - max(lo, 0)))
    return total
