"""Exact states of the blocks of a mask: by its block rule, and by evaluating it where the rule does not decide."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import torch

from flexgen.capture.live import LiveMods, Reading
from flexgen.codegen.block_table_emit import emit_block_table
from flexgen.errors import FlexgenError
from flexgen.ir.graph import Axis
from flexgen.ir.simplify import simplify
from flexgen.lowering.blocks import block_rule
from flexgen.lowering.table_plan import MAX_BLOCK_PAIRS, TablePlan
from flexgen.problem import GRID_LIMIT, INDEX_LIMIT
from flexgen.runtime.derived_table import MaskValues
from flexgen.runtime.describe import Launch, is_wide, scalars_are_trusted
from flexgen.runtime.device_target import target_of
from flexgen.runtime.mask_counts import MaskGrid, count_live_entries
from flexgen.runtime.mask_evaluation import BoxMask, Mod
from flexgen.runtime.table_kernels import TableKernels
from flexgen.runtime.wrappers import is_wrapper

KERNEL_PAIRS = 1 << 28  # (query, key) pairs; guess: with fewer, evaluating all costs less than compiling kernels
MAX_KEPT = 64  # masks and kernels; the least recently made go first


class BlockStates:
    """Captured masks and their kernels, kept between calls; safe from several threads."""

    def __init__(self) -> None:
        self._mods: OrderedDict[int, LiveMods] = OrderedDict()  # by id; LiveMods keep their callables alive
        self._kernels: OrderedDict[Hashable, TableKernels] = OrderedDict()
        self._lock = threading.Lock()

    def exact(self, mask: Mod | Reading, evaluated: BoxMask, grid: MaskGrid, device: torch.device) -> torch.Tensor:
        """Return the exact state of every block: of a large mask on a GPU by generated kernels, else by evaluation.

        Args:
            mask: a mask_mod, or what was captured of one.
            evaluated: the same mask.

        Returns:
            int8 [batch, heads, num_q_blocks, num_kv_blocks]: 0 where no pair is live, 2 where all are and the block
            is not cut by an end of the data, else 1.
        """
        pairs = grid.batch * grid.heads * grid.query_length * grid.key_length
        if device.type == "cuda" and pairs >= KERNEL_PAIRS:
            states = self.of(mask, grid, _indexed(device))
            if states is not None:
                return states
        counts = count_live_entries(evaluated, grid, device)
        return (counts > 0).to(torch.int8) + (counts == grid.q_block_size * grid.kv_block_size)

    def of(self, mask: Mod | Reading, grid: MaskGrid, device: torch.device) -> torch.Tensor | None:
        """Return the exact state of every block, found by generated kernels; see `exact`.

        Returns:
            The states; None where kernels cannot tell: the mask cannot be captured, a captured tensor lies elsewhere or
            is a wrapper, a number is huge, or blocks are not of a size that they take.
        """
        if not _is_taken(grid):
            return None
        try:
            with self._lock:
                reading = mask if isinstance(mask, Reading) else self._live(mask).current()
                launch = _launch(reading, grid, device)
                if any(buffer.device != device or is_wrapper(buffer) for buffer in reading.buffers):
                    return None
                if not scalars_are_trusted(launch.scalars):
                    return None
                kernels = self._of_size(reading, grid, launch)
        except FlexgenError:  # what flexgen does not capture, torch's own operations may evaluate
            return None
        table = kernels.build(launch, MaskValues((), ()), None)
        return kernels.states(launch, table).expand(grid.batch, grid.heads, -1, -1)

    def _live(self, mask_mod: Mod) -> LiveMods:
        found = self._mods.get(id(mask_mod))
        if found is None:
            found = self._mods[id(mask_mod)] = LiveMods(None, mask_mod)
            if len(self._mods) > MAX_KEPT:
                self._mods.popitem(last=False)
        return found

    def _of_size(self, reading: Reading, grid: MaskGrid, launch: Launch) -> TableKernels:
        captured = reading.captured
        wide = frozenset(name for name, buffer in launch.buffers.items() if is_wide(buffer))
        wide |= {name for name, n in launch.scalars.items() if isinstance(n, int) and abs(n) > INDEX_LIMIT}
        wide_index = max(grid.query_length, grid.key_length) >= INDEX_LIMIT
        key = (id(captured), grid.q_block_size, grid.kv_block_size, launch.device, wide, wide_index)
        kernels = self._kernels.get(key)
        if kernels is None or kernels.owner is not captured:
            simplified = simplify(captured.mods, captured.origins)
            mask = simplified.mods.mask
            assert mask is not None
            sizes = (grid.q_block_size, grid.kv_block_size)
            rule = block_rule(mask, simplified.origins)
            plan = TablePlan(target_of(launch.device), rule, *sizes, Axis.KV, wide, wide_index, exact=True, num_warps=8)
            source = emit_block_table(mask, simplified.origins, plan)
            kernels = self._kernels[key] = TableKernels(source, plan, captured)
            if len(self._kernels) > MAX_KEPT:
                self._kernels.popitem(last=False)
        return kernels


def _indexed(device: torch.device) -> torch.device:
    """Return the device that tensors made on `device` are on."""
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _is_taken(grid: MaskGrid) -> bool:
    sides = (grid.q_block_size, grid.kv_block_size)
    powers = all(side >= 16 and side & (side - 1) == 0 for side in sides)
    extents = (grid.batch, grid.heads, grid.query_length, grid.key_length)
    fits = sides[0] * sides[1] <= MAX_BLOCK_PAIRS and max(grid.batch, grid.heads) <= GRID_LIMIT
    return powers and fits and 0 not in extents


def _launch(reading: Reading, grid: MaskGrid, device: torch.device) -> Launch:
    mods = reading.captured.mods
    return Launch(
        batch=grid.batch,
        q_heads=grid.heads,
        kv_heads=grid.heads,
        q_len=grid.query_length,
        kv_len=grid.key_length,
        tensors={"query": torch.empty(0, device=device)},
        scale=1.0,
        buffers=dict(zip((buffer.name for buffer in mods.buffers), reading.buffers, strict=True)),
        scalars=dict(zip((scalar.name for scalar in mods.scalars), reading.scalars, strict=True)),
    )
