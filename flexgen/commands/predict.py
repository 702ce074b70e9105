"""Counts what the kernels of a command's subject visit, and predicts their work from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from flexgen.commands.mask_subject import MaskSubject, Place, mask_subject
from flexgen.commands.subject import Subject, fitting_shape
from flexgen.commands.tile_map import TileMap, Visit, map_tiles
from flexgen.commands.tile_map_ranges import packed_heads
from flexgen.ir.graph import Axis
from flexgen.lowered import Lowered
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.work import Visited, Work, predict_work, special_functions

MOST_PLACES = 16  # (batch, head) at which a mask that depends on them is counted; beyond, the rest is estimated


def predict(subject: Subject, lowered: Lowered) -> tuple[Work, ...]:
    """Return the predicted work of the forward kernel, and of each backward one but delta, in the order they run.

    Raises:
        UserFileError: a mod reads outside of what it captured, at this shape.
    """
    mask = mask_subject(subject, Place())
    score = lowered.understood.mods.score
    root = score.root if score else None
    kernels: list[tuple[str, ForwardPlan | BackwardPlan]] = [("forward", lowered.plan)]
    backward = lowered.backward
    if backward is not None:
        passes = backward.passes.items()
        kernels += [(name, plan) for name, (_, plan) in passes if isinstance(plan, BackwardPlan)]
    grad = backward.kernels.score_grad if backward else None
    works = []
    with fitting_shape(subject.shape):
        for name, plan in kernels:
            visited = count_visited(mask, plan, lowered)
            functions = special_functions(plan, root, grad)
            works.append(predict_work(name, plan, subject.shape, visited, functions, _captured_bytes(mask, visited)))
    return tuple(works)


def count_visited(mask: MaskSubject, plan: ForwardPlan | BackwardPlan, lowered: Lowered) -> Visited:
    """Count what a kernel visits over all batches and heads: once where the mask is the same for each."""
    shape, packed = mask.shape, packed_heads(plan)
    if 0 in (shape.B, shape.Hq, shape.Lq, shape.Lk):
        return Visited(0, 0, 0, 0, 0)
    places = _places(mask)
    counted = _spread(places)
    maps = [map_tiles(mask.at(place), plan, lowered.understood.rule, every_pair=0) for place in counted]
    walks_queries = isinstance(plan, BackwardPlan) and plan.kernel is BackwardKernel.DKDV
    heads = shape.B * shape.Hq / len(maps)  # query heads that each map stands for
    live = sum(int(tiles.pairs.sum()) for tiles in maps) * heads
    visits = sum(tiles.count() - tiles.count(Visit.SKIPPED) for tiles in maps) * heads / packed
    step = plan.BLOCK_M if walks_queries else plan.BLOCK_N
    own = -(-shape.Lk // plan.BLOCK_N) * shape.Hkv if walks_queries else maps[0].visits.shape[0] * shape.Hq // packed
    read = sum(_read_rows(tiles, walks_queries, shape.Lq if walks_queries else shape.Lk) for tiles in maps)
    of_heads = heads if walks_queries else heads * shape.Hkv / shape.Hq
    return Visited(
        live=round(live),
        tiles=round(visits),
        programs=own * shape.B,
        walked_rows=round(visits * step),
        read_rows=round(read * of_heads),
        estimated=len(counted) < len(places),
    )


def _places(mask: MaskSubject) -> list[Place]:
    """Return the (batch, head) at which the mask may differ."""
    axes = mask.graph.root.axes if mask.graph else frozenset()
    batches = range(mask.shape.B) if Axis.B in axes else range(1)
    heads = range(mask.shape.Hq) if Axis.H in axes else range(1)
    return [Place(b, h) for b, h in itertools.product(batches, heads)]


def _spread(places: list[Place]) -> list[Place]:
    """Return some of the places, evenly spread, where they are many."""
    if len(places) <= MOST_PLACES:
        return places
    return [places[number * len(places) // MOST_PLACES] for number in range(MOST_PLACES)]


def _read_rows(tiles: TileMap, walks_queries: bool, length: int) -> int:
    """Return how many rows of the walked side lie in a tile that any program visits."""
    visited: torch.Tensor = (tiles.visits != Visit.SKIPPED).any(1 if walks_queries else 0)
    step = tiles.rows if walks_queries else tiles.columns
    rows = (length - torch.arange(0, length, step)).clamp(max=step)
    return int((rows * visited).sum())


def _captured_bytes(mask: MaskSubject, visited: Visited) -> int:
    """Return what is read of captured tensors: all of each, or one element a live pair where that is less."""
    tensors: Iterable[torch.Tensor] = mask.buffers.values()
    return sum(min(tensor.numel(), visited.live) * tensor.element_size() for tensor in tensors)
