"""Exact states of the blocks of a mask, by its block rule and by evaluating it only where the rule does not decide."""

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
from flexgen.lowering.table_plan import TablePlan
from flexgen.problem import INDEX_LIMIT
from flexgen.runtime.derived_table import MaskValues
from flexgen.runtime.describe import INT32_END, Launch, buffer_span, scalars_are_trusted
from flexgen.runtime.device_target import target_of
from flexgen.runtime.mask_counts import MaskGrid
from flexgen.runtime.mask_evaluation import Mod
from flexgen.runtime.table_kernels import TableKernels

MAX_BLOCK_PAIRS = 1 << 15  # of a block; more do not fit the registers of a program
_MAX_KEPT = 64


class BlockStates:
    """Masks captured once, and the kernels of each size of block; safe from several threads."""

    def __init__(self) -> None:
        self._mods: OrderedDict[int, LiveMods] = OrderedDict()
        self._kernels: OrderedDict[Hashable, TableKernels] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, mask_mod: Mod, grid: MaskGrid, device: torch.device) -> torch.Tensor | None:
        """Return int8 [batch, heads, rows, columns]: 0 empty, 1 partial, 2 full as torch has it.

        None where kernels cannot tell: the mask is not captured, or the blocks or lengths are not of a kind they take.
        """
        if not _takes(grid):
            return None
        try:
            with self._lock:
                reading = _keep(self._mods, id(mask_mod), lambda: LiveMods(None, mask_mod), mask_mod).current()
                launch = _launch(reading, grid, device)
                kernels = self._of_form(reading, grid, launch) if _is_ordinary(launch) else None
        except FlexgenError:  # what kernels do not take, torch's own operations may
            return None
        if kernels is None:
            return None
        table = kernels.build(launch, MaskValues((), ()), None)
        states = kernels.states(launch, table)
        return states.expand(grid.batch, grid.heads, -1, -1)
