"""Counts what the kernels of a command's subject visit, and predicts their work from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.commands.arguments import Shape
from flexgen.commands.mask_subject import MaskSubject, Place, mask_subject
from flexgen.commands.subject import Subject
from flexgen.commands.tile_map import Visit, lengths, visit_tiles
from flexgen.commands.tile_map_ranges import packed_heads
from flexgen.commands.tile_pairs import count_in_tiles
from flexgen.ir.graph import Axis
from flexgen.lowered import Lowered
from flexgen.lowering.plans import AnyBackwardPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.lowering.triton_decode.splits import Extent, split_count
from flexgen.work import Visited, Work, predict_work, special_functions

# Beyond these, what is counted stands for the rest too, and the report says so.
MOST_PLACES = 16  # (batch, head) at which a mask that depends on them is evaluated
MOST_PAIRS = 1 << 26  # pairs of tiles that the mask cuts, evaluated at one place: a second or two


@dataclass(frozen=True, slots=True)
class _Counted:
    """What is visited at one (batch, query head): of a group of heads where they share tiles."""

    live: float
    tiles: int
    read_rows: int
    own_tiles: int
    estimated: bool


def predict(subject: Subject, lowered: Lowered) -> tuple[Work, ...]:
    """Return the predicted work of the forward kernel, and of each backward one but delta, in the order they run.

    The mask is evaluated as the kernel does: reads outside of a captured tensor give 0.
    """
    mask = mask_subject(subject, Place())
    score = lowered.understood.mods.score
    root = score.root if score else None
    kernels: list[tuple[str, WalkPlan]] = [("forward", lowered.plan)]
    backward = lowered.backward
    if backward is not None:
        passes = backward.passes.items()
        kernels += [(name, plan) for name, (_, plan) in passes if isinstance(plan, AnyBackwardPlan)]
    grad = backward.kernels.score_grad if backward else None
    works = []
    for name, plan in kernels:
        if subject.packed is None:
            visited = count_visited(mask, plan, lowered)
        else:
            visited = _visited_of_sequences(subject, subject.packed, plan, lowered)
        functions = special_functions(plan, root, grad)
        works.append(predict_work(name, plan, subject.shape, visited, functions, _captured_bytes(mask, visited)))
    return tuple(works)


def count_visited(mask: MaskSubject, plan: WalkPlan, lowered: Lowered) -> Visited:
    """Count what a kernel visits over all batches and heads: once where the mask is the same for each."""
    shape, packed = mask.shape, packed_heads(plan)
    if 0 in (shape.B, shape.Hq, shape.Lq, shape.Lk):
        return Visited(0, 0, 0, 0, 0, 0)
    places = _places(mask)
    chosen = _spread(places)
    counted = [_count(mask.at(place), plan, lowered) for place in chosen]
    walks_queries = _walks_queries(plan)
    heads = shape.B * shape.Hq / len(counted)  # query heads that each place stands for
    tiles = sum(each.tiles for each in counted) * heads / packed
    of_heads = heads if walks_queries else heads * shape.Hkv / shape.Hq
    owners = shape.Hkv if walks_queries else shape.Hq // packed
    programs = counted[0].own_tiles * owners * shape.B
    return Visited(
        live=round(sum(each.live for each in counted) * heads),
        tiles=round(tiles),
        programs=programs,
        walked_rows=round(tiles * (plan.BLOCK_M if walks_queries else plan.BLOCK_N)),
        read_rows=round(sum(each.read_rows for each in counted) * of_heads),
        pairs=shape.B * shape.Hq * shape.Lq * shape.Lk,
        estimated=len(chosen) < len(places) or any(each.estimated for each in counted),
        splits=_splits(plan, programs, shape),
    )


def _visited_of_sequences(subject: Subject, lengths_of: tuple[int, ...], plan: WalkPlan, lowered: Lowered) -> Visited:
    """Count what a kernel visits of packed sequences: each is one of a batch, with lengths of its own."""
    found: dict[tuple[int, int], Visited] = {}
    graph = lowered.understood.mods.mask
    by_number = graph is not None and Axis.B in graph.root.axes
    total = [0] * 5
    estimated = False
    for number, length in enumerate(lengths_of):
        key = (number if by_number else 0, length)
        if key not in found:
            found[key] = count_visited(mask_subject(subject, Place(number)), plan, lowered)
        one = found[key]
        parts = (one.live, one.tiles, one.walked_rows, one.read_rows, one.pairs)
        total = [old + new for old, new in zip(total, parts, strict=True)]
        estimated |= one.estimated
    block, heads = (plan.BLOCK_N, subject.shape.Hkv) if _walks_queries(plan) else (plan.BLOCK_M, subject.shape.Hq)
    programs = (-(-sum(lengths_of) // block) + len(lengths_of)) * heads
    live, tiles, walked_rows, read_rows, pairs = total
    return Visited(live, tiles, programs, walked_rows, read_rows, pairs, estimated)


def _splits(plan: WalkPlan, programs: int, shape: Shape) -> int:
    """Return over how many programs a launch on the plan's chip splits the keys."""
    if not isinstance(plan, DecodePlan):
        return 1
    processors = plan.target.chip.multiprocessors if plan.target.chip else 1
    return split_count(plan, Extent(programs, shape.Lq, shape.Lk, processors))


def _walks_queries(plan: WalkPlan) -> bool:
    return isinstance(plan, AnyBackwardPlan) and plan.kernel is BackwardKernel.DKDV


def _places(mask: MaskSubject) -> list[Place]:
    """Return the (batch, head) at which the mask may differ."""
    axes = mask.graph.root.axes if mask.graph else frozenset()
    batches = range(mask.shape.B) if Axis.B in axes else range(1)
    heads = range(mask.shape.Hq) if Axis.H in axes else range(1)
    return [Place(mask.place.b + b, h) for b, h in itertools.product(batches, heads)]


def _spread(places: list[Place]) -> list[Place]:
    """Return some of the places, evenly spread, where they are many."""
    if len(places) <= MOST_PLACES:
        return places
    return [places[number * len(places) // MOST_PLACES] for number in range(MOST_PLACES)]


def _count(mask: MaskSubject, plan: WalkPlan, lowered: Lowered) -> _Counted:
    rows, columns = max(plan.BLOCK_M // packed_heads(plan), 1), plan.BLOCK_N
    visits = visit_tiles(mask, plan, lowered.understood.rule, rows)
    row_lengths, column_lengths = lengths(mask.shape.Lq, rows), lengths(mask.shape.Lk, columns)
    sizes = row_lengths[:, None] * column_lengths[None, :]
    cut, estimated = _cut_pairs(mask, visits == Visit.CHECKED, rows, columns)
    visited = visits != Visit.SKIPPED
    walked, axis = (row_lengths, 1) if _walks_queries(plan) else (column_lengths, 0)
    return _Counted(
        live=int(sizes[visits == Visit.UNMASKED].sum()) + cut,
        tiles=int(visited.sum()),
        read_rows=int(walked[visited.any(axis)].sum()),
        own_tiles=visits.shape[1] if _walks_queries(plan) else visits.shape[0],
        estimated=estimated,
    )


def _cut_pairs(mask: MaskSubject, checked: Tensor, rows: int, columns: int) -> tuple[float, bool]:
    """Return the live pairs of the tiles in which the mask is applied, and whether they are an estimate."""
    number = int(checked.sum())
    if mask.graph is None:  # tiles at the end of the data are checked without a mask too
        sizes = lengths(mask.shape.Lq, rows)[:, None] * lengths(mask.shape.Lk, columns)[None, :]
        return int(sizes[checked].sum()), False
    step = -(-number * rows * columns // MOST_PAIRS)
    if step <= 1:
        return int(count_in_tiles(mask, checked, rows, columns).sum()), False
    chosen = torch.zeros_like(checked)
    q_tiles, kv_tiles = (places[::step] for places in checked.nonzero(as_tuple=True))
    chosen[q_tiles, kv_tiles] = True
    return int(count_in_tiles(mask, chosen, rows, columns).sum()) * number / len(q_tiles), True


def _captured_bytes(mask: MaskSubject, visited: Visited) -> int:
    """Return what is read of captured tensors: all of each, or one element a live pair where that is less."""
    tensors: Iterable[torch.Tensor] = mask.buffers.values()
    return sum(min(tensor.numel(), visited.live) * tensor.element_size() for tensor in tensors)
