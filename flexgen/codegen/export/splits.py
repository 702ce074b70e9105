"""Over how many programs a decode launch splits its keys, as expressions of the host code."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.codegen.export.conditions import host_text
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.lowering.triton_decode.splits import LEAST_TILES, MOST_BALANCING, NEGLIGIBLE, PRICE, SATURATING


@dataclass(frozen=True, slots=True)
class Balance:
    """The numbers that the launcher balances waves of programs by."""

    saturating: float = SATURATING
    most: int = MOST_BALANCING
    negligible: float = NEGLIGIBLE
    price: float = PRICE


@dataclass(frozen=True, slots=True)
class SplitText:
    """How a launch counts its splits.

    Attributes:
        fixed: the number that was asked for; None where each launch counts.
        resident, held: programs of a multiprocessor that splits are counted for, and that it holds at a time.
        keys: how many keys a row tile visits at most.
        least_tiles, block_n: of a split, and keys of a tile.
        partial_width: elements of a partial row in scratch memory.
        balance: how waves of programs are balanced that fill the device by themselves.
    """

    fixed: int | None
    resident: int
    held: int
    keys: str
    least_tiles: int
    block_n: int
    partial_width: int
    balance: Balance


def split_text(plan: DecodePlan) -> SplitText:
    """Return the counterpart of `split_count`."""
    known = ["kv_len"] + ([f"{plan.LIVE_KEYS} + q_len - 1"] if plan.LIVE_KEYS is not None else [])
    ranges = _keys_in_ranges(plan)
    known += [ranges] if ranges is not None else []
    keys = f"min({', '.join(known)})" if len(known) > 1 else known[0]
    width, balance = plan.PARTIAL_WIDTH, Balance()
    return SplitText(plan.SPLIT_KV, plan.resident, plan.held, keys, LEAST_TILES, plan.BLOCK_N, width, balance)


def _keys_in_ranges(plan: DecodePlan) -> str | None:
    """Return the keys in the schedule's ranges; None where they depend on more than lengths."""
    inputs = {"q_lo": "0", "q_hi": "(q_len - 1)", "Q_LEN": "q_len", "KV_LEN": "kv_len"}
    parts: list[str] = []
    for segment in plan.schedule.segments:
        lo, hi = (host_text(bound.node, inputs) for bound in (segment.visit_lo, segment.visit_hi))
        if lo is None or hi is None:
            return None
        parts.append(f"max(0, min({hi}, kv_len) - max({lo}, 0))")
    return " + ".join(parts) or "0"
