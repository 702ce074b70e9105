"""What is tried: settings of options, in groups that are searched one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from flexgen.lowered import Lowered
from flexgen.lowering.plans import AnyBackwardPlan, AnyForwardPlan
from flexgen.lowering.rounding import round_up_to_power_of_two
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.tuning.settings import Settings

TunedDirection = Literal["forward", "backward"]

_ROWS, _KEYS, _WARPS = (16, 32, 64, 128), (32, 64, 128), (4, 8)
_STAGES = {"cuda": (2, 3, 4), "hip": (1, 2)}
_DECODE_KEYS, _DECODE_WARPS = (32, 64, 128, 256), (2, 4, 8)
_DECODE_STAGES = {"cuda": (2, 3, 4, 5), "hip": (1, 2)}
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_BACKWARD_STAGES = {"cuda": (1, 2, 3), "hip": (1, 2)}
_BACKWARD_BLOCKS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Group:
    """Settings of which the best is taken before the next group is searched, each over the best so far."""

    name: str
    settings: tuple[Settings, ...]


def groups(lowered: Lowered, direction: TunedDirection, query_rows: int) -> tuple[Group, ...]:
    """Return what to try.

    Args:
        lowered: as flexgen decides by itself.
        query_rows: rows of queries that a program could hold: the query length times the heads packed in a tile.
    """
    if direction == "backward":
        return _backward(lowered)
    plan = lowered.plan
    if isinstance(plan, DecodePlan):
        tiles = Group("tile, warps and stages", tuple(_decode_tiles(plan)))
        return (tiles, Group("splits", tuple({"fwd_SPLIT_KV": number} for number in _SPLITS)))
    tiles = Group("tile, warps and stages", tuple(_forward_tiles(plan, query_rows)))
    return (tiles, Group("other options", tuple(_forward_flags(plan))))


def _forward_tiles(plan: AnyForwardPlan, query_rows: int) -> Iterator[Settings]:
    most = max(round_up_to_power_of_two(max(query_rows, 1)), _ROWS[0])
    rows = [size for size in _ROWS if size <= most and (size >= 32 or size == most)] or [_ROWS[0]]
    stages = _STAGES.get(plan.target.backend, (1,))
    for values in itertools.product(rows, _KEYS, _WARPS, stages):
        names = ("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages")
        yield {"fwd_BACKEND": "TRITON", **dict(zip(names, values, strict=True))}
    if plan.target.matrix_unit == "wgmma":
        for block_m, block_n in itertools.product((64, 128), (64, 128)):
            yield {"fwd_BACKEND": "GLUON", "fwd_BLOCK_M": block_m, "fwd_BLOCK_N": block_n}


def _decode_tiles(plan: DecodePlan) -> Iterator[Settings]:
    """Yield tiles of all rows that share keys: fewer rows would read the keys again."""
    stages = _DECODE_STAGES.get(plan.target.backend, (1,))
    names = ("fwd_BLOCK_N", "fwd_num_warps", "fwd_num_stages")
    yield from _product(names, (_DECODE_KEYS, _DECODE_WARPS, stages))


def _forward_flags(plan: AnyForwardPlan) -> Iterator[Settings]:
    """Yield options that change no result: the order of programs, how tiles are fetched and sums are scaled."""
    yield {"fwd_LONG_ROWS_FIRST": not plan.LONG_ROWS_FIRST}
    yield {"fwd_USE_SUBTILING": True}
    if plan.target.has_tma:
        yield {"fwd_USE_TMA": True}


def _backward(lowered: Lowered) -> tuple[Group, ...]:
    passes = lowered.backward.passes.values() if lowered.backward else ()
    kernels = {plan.kernel for _, plan in passes if isinstance(plan, AnyBackwardPlan)}
    stages = _BACKWARD_STAGES.get(lowered.plan.target.backend, (1,))
    found = [Group("warps and stages", tuple(_product(("bwd_num_warps", "bwd_num_stages"), (_WARPS, stages))))]
    for kernel, number, name in ((BackwardKernel.DKDV, 1, "tile of dK and dV"), (BackwardKernel.DQ, 2, "tile of dQ")):
        if kernel in kernels:
            names = (f"bwd_BLOCK_M{number}", f"bwd_BLOCK_N{number}")
            found.append(Group(name, tuple(_product(names, (_BACKWARD_BLOCKS, _BACKWARD_BLOCKS)))))
    return tuple(found)


def _product(names: Sequence[str], values: Sequence[Sequence[object]]) -> Iterator[Settings]:
    return (dict(zip(names, each, strict=True)) for each in itertools.product(*values))


def why_pruned(lowered: Lowered, direction: TunedDirection) -> str | None:
    """Return why the model of registers and shared memory gives up on a lowering; None where it does not.

    A forced tile that the model rejects is still lowered, for a person may insist; its plan holds the reason.
    """
    plans = [plan for plan in map(lowered.plan_of, entries_of(lowered, direction)) if _has_tile(plan)]
    for plan in plans:
        for decision in getattr(plan, "decisions", ()):
            if decision.name == "BLOCK_M" and decision.rejected and decision.because == "asked for":
                return str(decision.rejected[0].because)
    return None


def _has_tile(plan: object) -> bool:
    return isinstance(plan, ForwardPlan | AnyBackwardPlan)


def entries_of(lowered: Lowered, direction: TunedDirection) -> tuple[str, ...]:
    """Return the names of the kernels that a direction runs."""
    backward = lowered.backward.passes if lowered.backward else ()
    return tuple(entry for entry in lowered.entries if (entry in backward) == (direction == "backward"))
