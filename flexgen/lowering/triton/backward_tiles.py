"""Tile choices of the backward kernels, and the physics that rules them in or out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton.tiles import REGISTER_BUDGET, Tile, TileShape, dropped_bytes, halvings

# The options that hold a kernel's tile: Inductor's names for queries and keys of dK/dV and of dQ.
TILE_OPTIONS = {
    BackwardKernel.DKDV: {"BLOCK_M1": "BLOCK_M", "BLOCK_N1": "BLOCK_N"},
    BackwardKernel.DQ: {"BLOCK_M2": "BLOCK_M", "BLOCK_N2": "BLOCK_N"},
}


@dataclass(frozen=True, slots=True)
class BackwardPhysics:
    """What a backward tile needs of the chip. Fitted to about 80 kernels compiled offline, by Triton 3.7.

    Attributes:
        kept_tiles: tiles of scores that mods keep in registers besides weights and their gradients.
    """

    kernel: BackwardKernel
    kept_tiles: int = 0

    @property
    def option_names(self) -> Mapping[str, str]:
        return {block: option for option, block in TILE_OPTIONS[self.kernel].items()}

    def shared_bytes(self, tile: Tile, shape: TileShape, target: Target) -> int:
        """Return an upper bound: the own side's two tiles, each stage's two walked ones, and the scores' operands."""
        own_rows, walked_rows = self._sides(tile)
        row_bytes = (shape.qk_rounded + shape.v_rounded) * shape.query_bytes
        scores = 2 * tile.BLOCK_M * tile.BLOCK_N * shape.query_bytes
        captured = tile.BLOCK_M * tile.BLOCK_N * shape.captured.tile_bytes
        walked = walked_rows * (row_bytes + 2 * 4 + shape.captured.key_bytes) + captured
        if target.matrix_unit == "mfma" and tile.num_stages == 1:  # one tile at a time passes through
            return max(own_rows, walked_rows) * row_bytes + scores + captured
        if target.matrix_unit == "tcgen05":  # sums leave the matrix unit's memory through shared memory
            sums = own_rows * self._width(shape) * shape.query_bytes
            slack = 2048 + dropped_bytes(tile, shape, target)
            return own_rows * row_bytes + tile.num_stages * walked + max(scores, sums) + slack
        stages = tile.num_stages if target.matrix_unit == "wgmma" else max(tile.num_stages - 1, 1)
        transposed = walked_rows * row_bytes // 2 if tile.num_stages == 1 else 0
        return own_rows * row_bytes + stages * walked + transposed + scores + 4096

    def infeasible(self, tile: Tile, shape: TileShape, target: Target) -> str | None:
        """Return why a tile cannot run well on the target; None if it can."""
        if target.backend == "interpret":
            return None
        needed = self.shared_bytes(tile, shape, target)
        if needed > target.shared_bytes:
            return f"needs {needed} bytes of shared memory, {target.name} has {target.shared_bytes}"
        held = self._registers(tile, shape, target)
        budget = REGISTER_BUDGET[target.matrix_unit] * 5 // 4  # a few spilled values outside the loop cost little
        if held > budget:
            return f"holds {held} values a thread in registers, more than {budget} spill"
        return None

    def _registers(self, tile: Tile, shape: TileShape, target: Target) -> int:
        own_rows, walked_rows = self._sides(tile)
        tiles = 2 + self.kept_tiles
        return own_rows * (self._width(shape) + tiles * walked_rows) // (tile.num_warps * target.warp_size)

    def _width(self, shape: TileShape) -> int:
        """Return how many sums there are for each row of the own side."""
        return shape.qk_rounded if self.kernel is BackwardKernel.DQ else shape.qk_rounded + shape.v_rounded

    def smaller(self, tile: Tile) -> Iterator[Tile]:
        """Yield ever smaller tiles: the walked side down to 32, then more warps, and the own side last.

        Matrix units of newer chips need 64 rows of the own side.
        """
        own_rows, walked_rows = self._sides(tile)
        for least in (32, 16):
            for own in halvings(own_rows, 16):
                for warps in dict.fromkeys((tile.num_warps, 8)):
                    for walked in halvings(walked_rows, least):
                        for stages in range(tile.num_stages, 0, -1):
                            yield self._tile(own, walked, warps, stages)

    def _tile(self, own: int, walked: int, warps: int, stages: int) -> Tile:
        sides = (own, walked) if self.kernel is BackwardKernel.DQ else (walked, own)
        return Tile(*sides, warps, stages)

    def _sides(self, tile: Tile) -> tuple[int, int]:
        is_dq = self.kernel is BackwardKernel.DQ
        return (tile.BLOCK_M, tile.BLOCK_N) if is_dq else (tile.BLOCK_N, tile.BLOCK_M)


Sizes = Mapping[int, tuple[int, int, int, int]]  # own side, walked side, warps and stages, by the largest head dim

# H200, bf16, both kernels: benchmarks/results/tiles_h200.md. At 256 with one stage 158 TFLOP/s were measured; compiled
# offline, a second stage keeps dQ from spilling (of 652 stores, none is left) and dK/dV from most of it (308 of 1340).
_HOPPER: Sizes = {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2), 1 << 30: (32, 32, 8, 1)}
# Not measured; the largest that do not spill when compiled offline for gfx942. Eight warps halve the registers.
_AMD: Mapping[BackwardKernel, Sizes] = {
    BackwardKernel.DQ: {128: (64, 64, 4, 1), 256: (64, 32, 4, 1), 1 << 30: (32, 16, 4, 1)},
    BackwardKernel.DKDV: {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 4, 1), 1 << 30: (16, 16, 4, 1)},
}


def preferred(dtype: torch.dtype, head_dim: int, target: Target, kernel: BackwardKernel) -> tuple[Tile, str]:
    """Return the first choice for a head dim (the larger rounded one) and where it comes from."""
    if target.backend == "interpret":
        return Tile(128, 128, 4, 1), "the interpreter's cost is per step, not per element"
    if dtype.itemsize >= 4:
        return Tile(32, 32, 4, 1), "guess: float32 products run outside the matrix units"
    sizes = _AMD[kernel] if target.backend == "hip" else _HOPPER
    own, walked, warps, stages = sizes[next(limit for limit in sizes if head_dim <= limit)]
    measured = target.matrix_unit == "wgmma" and head_dim <= 128
    origin = "measured on H200" if measured else f"not measured on {target.name}, chosen by registers and memory"
    return Tile(*((own, walked) if kernel is BackwardKernel.DQ else (walked, own)), warps, stages), origin
