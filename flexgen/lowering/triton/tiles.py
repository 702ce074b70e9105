"""Tile choices of the plain Triton forward kernel, and the physics that rules them in or out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexgen.ir.graph import Axis, Mods
from flexgen.lowering.targets import Target

# Accumulator, scores and weights of a tile live in registers; past this many 32-bit values a thread they spill
# (255 are addressable, the rest goes to addresses, row statistics and operands).
REGISTER_BUDGET = 208


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile and how a program works on it."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class CapturedLoads:
    """Element sizes, summed over a mod's loads, of what Triton's pipeline copies to shared memory ahead of use.

    Attributes:
        tile_bytes: loads indexed by query and key: one element for each score.
        key_bytes: loads indexed by the key alone.
    """

    tile_bytes: int = 0
    key_bytes: int = 0


def captured_loads(mods: Mods) -> CapturedLoads:
    """Sum the loads of both mods that depend on the key."""
    loads = {node for graph in mods.graphs() for node in graph.nodes() if node.op == "load" and Axis.KV in node.axes}
    tile = sum(node.dtype.itemsize for node in loads if Axis.Q in node.axes)
    return CapturedLoads(tile, sum(node.dtype.itemsize for node in loads if Axis.Q not in node.axes))


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a tile's cost depends on besides the tile.

    Attributes:
        qk_rounded, v_rounded: rounded head dims.
        query_bytes, key_bytes, value_bytes: element sizes.
        captured: loads of captured tensors inside the loop.
    """

    qk_rounded: int
    v_rounded: int
    query_bytes: int
    key_bytes: int
    value_bytes: int
    captured: CapturedLoads


def shared_bytes(tile: Tile, shape: TileShape, target: Target) -> int:
    """Return an upper bound on the shared memory a program needs.

    The query tile, and the key and value tiles of each pipeline stage. Asynchronous copies of sm_80 and AMD keep
    one stage fewer than num_stages in memory; the weights of a tile pass through shared memory where the matrix
    unit cannot read them from registers.
    """
    query = tile.BLOCK_M * shape.qk_rounded * shape.query_bytes
    keys = tile.BLOCK_N * (shape.qk_rounded * shape.key_bytes + shape.v_rounded * shape.value_bytes)
    weights = tile.BLOCK_M * tile.BLOCK_N * shape.value_bytes
    keys += tile.BLOCK_N * (tile.BLOCK_M * shape.captured.tile_bytes + shape.captured.key_bytes)
    exchange = tile.BLOCK_M * 4 * tile.num_warps  # row reductions across warps, and barriers
    match target.matrix_unit:
        case "wgmma":
            return query + tile.num_stages * keys + exchange
        case "tcgen05":
            return query + tile.num_stages * keys + weights + exchange
        case _:
            return max(query, weights) + max(tile.num_stages - 1, 1) * keys + exchange


def registers(tile: Tile, shape: TileShape, target: Target) -> int:
    """Return the 32-bit values a thread holds for the accumulator and the scores of a tile."""
    if target.matrix_unit == "tcgen05":  # the accumulator lives in tensor memory
        return tile.BLOCK_M * tile.BLOCK_N // (tile.num_warps * target.warp_size)
    per_row = shape.v_rounded + tile.BLOCK_N
    return tile.BLOCK_M * per_row // (tile.num_warps * target.warp_size)


def infeasible(tile: Tile, shape: TileShape, target: Target) -> str | None:
    """Return why a tile cannot run well on the target; None if it can."""
    if target.backend == "interpret":
        return None
    needed = shared_bytes(tile, shape, target)
    if needed > target.shared_bytes:
        return f"needs {needed} bytes of shared memory, {target.name} has {target.shared_bytes}"
    held = registers(tile, shape, target)
    if held > REGISTER_BUDGET:
        return f"holds {held} values a thread in registers, more than {REGISTER_BUDGET} spill"
    return None


def preferred(dtype: torch.dtype, head_dim: int, target: Target) -> tuple[Tile, str]:
    """Return the first choice for a head dim (the larger rounded one) and where it comes from."""
    if target.backend == "interpret":
        return Tile(128, 128, 4, 1), "the interpreter's cost is per step, not per element"
    if dtype.itemsize >= 4:
        tile = Tile(64, 32, 4, 2) if head_dim <= 128 else Tile(32, 32, 4, 2)
        return tile, "guess: float32 products run outside the matrix units, so small tiles keep registers free"
    if target.backend == "hip":
        tile = Tile(128, 64, 4, 1) if head_dim <= 64 else Tile(64, 64, 4, 1)
        return tile, "guess: LDS holds one stage"
    if target.matrix_unit == "wgmma":
        return _WGMMA[next(limit for limit in _WGMMA if head_dim <= limit)], "guess until measured on sm_90"
    tile = Tile(128, 64, 4, 3) if head_dim <= 64 else Tile(64, 64, 4, 3)
    return tile, f"guess for {target.name}"


_WGMMA = {
    64: Tile(128, 64, 4, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(128, 64, 8, 2),
    512: Tile(64, 32, 8, 2),
    1 << 30: Tile(16, 16, 4, 1),
}


def smaller(tile: Tile) -> Iterator[Tile]:
    """Yield ever smaller tiles: fewer stages first, then fewer keys, then fewer rows, then more warps."""
    for rows in _halvings(tile.BLOCK_M):
        for warps in (tile.num_warps, 8):
            for keys in _halvings(tile.BLOCK_N):
                for stages in range(tile.num_stages, 0, -1):
                    yield Tile(rows, keys, warps, stages)


def _halvings(size: int) -> Iterator[int]:
    while size >= 16:
        yield size
        size //= 2
