"""Tile choices of the plain Triton forward kernel, and the physics that rules them in or out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from flexgen.ir.graph import Axis, Mods
from flexgen.lowering.targets import Target

# Accumulator and scores of a tile live in registers. Past this many 32-bit values a thread, kernels compiled offline
# for the matrix unit spilled (255 registers are addressable; AMD's accumulation registers double that).
REGISTER_BUDGET = {"mma": 112, "wgmma": 160, "tcgen05": 112, "mfma": 128, "numpy": 1 << 30}


def register_budget(tile: Tile, target: Target) -> int:
    """Return how many values of accumulator and scores a thread may hold; more warps leave AMD's fewer registers."""
    crowded = target.matrix_unit == "mfma" and tile.num_warps > 4
    return 60 if crowded else REGISTER_BUDGET[target.matrix_unit]


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
        bulk_copies: keys and values come through the copy engine (USE_TMA).
        splits_operands: each operand is kept in two parts (FLOAT32_PRECISION tf32x3).
        looks_up_pages: the address of keys is read first, so that the pipeline has two steps for each tile of keys.
        drops: softmax weights are dropped.
    """

    qk_rounded: int
    v_rounded: int
    query_bytes: int
    key_bytes: int
    value_bytes: int
    captured: CapturedLoads
    bulk_copies: bool = False
    splits_operands: bool = False
    looks_up_pages: bool = False
    drops: bool = False

    @property
    def converts(self) -> bool:
        """Keys and values are stored in another dtype than they are multiplied in."""
        return self.key_bytes != self.query_bytes or self.value_bytes != self.query_bytes


def dropped_bytes(tile: Tile, shape: TileShape, target: Target) -> int:
    """Return the shared memory that says which pairs of a tile are dropped.

    A thread of the older matrix units holds what it draws; newer units lay scores out in another way, so that a byte
    for each pair passes through shared memory (compiled offline by Triton 3.7).
    """
    return tile.BLOCK_M * tile.BLOCK_N if shape.drops and target.matrix_unit == "tcgen05" else 0


def shared_bytes(tile: Tile, shape: TileShape, target: Target) -> int:
    """Return an upper bound on the shared memory a program needs.

    Fitted to what Triton 3.6 and 3.7 allocate (about 200 kernels compiled offline for each matrix unit): the query
    tile, a key and a value tile for each pipeline stage, and the weights where they pass through shared memory.
    """
    query = tile.BLOCK_M * shape.qk_rounded * shape.query_bytes
    key_tile = tile.BLOCK_N * shape.qk_rounded * shape.key_bytes
    value_tile = tile.BLOCK_N * shape.v_rounded * shape.value_bytes
    keys = key_tile + value_tile
    weights = tile.BLOCK_M * tile.BLOCK_N * shape.query_bytes
    stages = (tile.num_stages + 1) // 2 if shape.looks_up_pages else tile.num_stages
    ahead = max(stages - 1, 1)
    captured = ahead * tile.BLOCK_N * (tile.BLOCK_M * shape.captured.tile_bytes + shape.captured.key_bytes)
    if shape.captured.tile_bytes:  # narrow elements are padded to 4 bytes where their layout is converted
        captured = max(captured, min(4 * tile.BLOCK_M * tile.BLOCK_N, 8192))
    slack = 1088 + 4 * tile.BLOCK_M * tile.num_warps  # barriers, alignment, and row statistics across warps
    slack += tile.num_stages * 4 * tile.BLOCK_N if shape.looks_up_pages else 0
    if shape.converts:  # one tile at a time
        slack += tile.BLOCK_N * max(shape.qk_rounded, shape.v_rounded) * shape.query_bytes
    slack += dropped_bytes(tile, shape, target)
    if target.matrix_unit in ("wgmma", "tcgen05") and tile.BLOCK_M >= 64 and shape.query_bytes < 4:
        return query + stages * keys + captured + slack
    if target.matrix_unit == "mfma" and tile.num_stages == 1 and not shape.converts:
        return max(query, key_tile, value_tile, weights) + captured
    # Matrix instructions of a single warp, also on newer chips where a tile has fewer than 64 rows.
    copies = stages if shape.bulk_copies else ahead
    split = query + keys if shape.splits_operands else 0
    return query + weights + copies * keys + split + captured + slack


def registers(tile: Tile, shape: TileShape, target: Target) -> int:
    """Return the 32-bit values a thread holds for the accumulator and the scores of a tile.

    The scores' half-precision copy, addresses and statistics come on top: measured, about as much again by half.
    """
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
    budget = register_budget(tile, target)
    if held > budget:
        return f"holds {held} values a thread in registers, more than {budget} spill"
    return None


class Physics(Protocol):
    """What one kind of kernel needs of a chip, and which options hold its tile."""

    @property
    def option_names(self) -> Mapping[str, str]:
        """The user's option for BLOCK_M and for BLOCK_N, where it has another name."""

    def shared_bytes(self, tile: Tile, shape: TileShape, target: Target) -> int:
        """Return an upper bound on the shared memory a program needs."""

    def infeasible(self, tile: Tile, shape: TileShape, target: Target) -> str | None:
        """Return why a tile cannot run well on the target; None if it can."""

    def smaller(self, tile: Tile) -> Iterator[Tile]:
        """Yield a first choice, and ever smaller ones."""


class ForwardPhysics:
    """The forward kernel's."""

    option_names: Mapping[str, str] = MappingProxyType({})

    def shared_bytes(self, tile: Tile, shape: TileShape, target: Target) -> int:
        return shared_bytes(tile, shape, target)

    def infeasible(self, tile: Tile, shape: TileShape, target: Target) -> str | None:
        return infeasible(tile, shape, target)

    def smaller(self, tile: Tile) -> Iterator[Tile]:
        return smaller(tile)


def preferred(dtype: torch.dtype, head_dim: int, target: Target, *, masked: bool) -> tuple[Tile, str]:
    """Return the first choice and where it comes from.

    Args:
        head_dim: the larger rounded one.
        masked: some tiles are crossed by the mask's edge.
    """
    if target.backend == "interpret":
        return Tile(128, 128, 4, 1), "the interpreter's cost is per step, not per element"
    if dtype.itemsize >= 4:
        tile = _FLOAT32[next(limit for limit in _FLOAT32 if head_dim <= limit)]
        return tile, "float32 products run outside the matrix units; the largest tile that compiled without spills"
    if target.backend == "hip":
        tile = Tile(128, 64, 4, 1) if head_dim <= 64 else Tile(64, 64, 4, 1) if head_dim <= 256 else Tile(32, 32, 4, 1)
        return tile, "guess: LDS holds one stage"
    if target.matrix_unit == "wgmma" and masked and head_dim <= 128:
        return _WGMMA_MASKED, "masked: small tiles waste fewer keys at the mask's edges (measured on H200)"
    if target.matrix_unit == "wgmma":
        return _WGMMA[next(limit for limit in _WGMMA if head_dim <= limit)], "measured on H200"
    tile = Tile(128, 64, 8, 3) if head_dim <= 64 else Tile(64, 64, 4, 3)
    return tile, f"guess for {target.name}"


# H200, bf16, S = 8192, B = 2, heads x head dim = 2048, TFLOP/s: benchmarks/results/tiles_h200.md.
_WGMMA = {
    64: Tile(128, 64, 4, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(128, 64, 8, 2),
    1 << 30: Tile(32, 32, 8, 2),
}
_FLOAT32 = {64: Tile(64, 32, 8, 2), 256: Tile(32, 16, 8, 2), 1 << 30: Tile(16, 16, 8, 2)}
_WGMMA_MASKED = Tile(64, 64, 4, 3)


def smaller(tile: Tile) -> Iterator[Tile]:
    """Yield ever smaller tiles: fewer stages first, then fewer keys, then fewer rows, then more warps."""
    for rows in halvings(tile.BLOCK_M):
        for warps in (tile.num_warps, 8):
            for keys in halvings(tile.BLOCK_N):
                for stages in range(tile.num_stages, 0, -1):
                    yield Tile(rows, keys, warps, stages)


def halvings(size: int, least: int = 16) -> Iterator[int]:
    """Yield a size, its half, and so on down to `least`."""
    while size >= least:
        yield size
        size //= 2
