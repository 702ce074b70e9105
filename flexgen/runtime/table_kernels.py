"""Runs the kernels that derive a block table: extremes of the leaves, counts, then the lists."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from flexgen.codegen.block_table_emit import TableSource
from flexgen.codegen.source import KernelSource, Role
from flexgen.ir.graph import Axis
from flexgen.lowering.table_plan import TablePlan
from flexgen.runtime.bind import bind
from flexgen.runtime.derived_table import DerivedTable, Lists, MaskValues, Ready, TableSizes, expanded, new_lists
from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import executor

_log = logging.getLogger("flexgen.tables")
_POINTED = {"*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32, "*fp64": torch.float64}


class TableKernels:
    """The kernels of one form of table.

    Args:
        owner: the captured mods whose mask it is.
    """

    def __init__(self, source: TableSource, plan: TablePlan, owner: object) -> None:
        self.plan, self.owner = plan, owner
        self._source = source
        entries = [*source.summaries.values(), source.count, source.fill]
        entries += [entry for entry in (source.decide, source.drop) if entry is not None]
        options = {"num_warps": plan.num_warps, "num_stages": 1}
        self._execute = {entry.entry: executor(entry, plan.target, options) for entry in entries}

    def build(self, launch: Launch, values: MaskValues, max_blocks: int | None) -> DerivedTable:
        """Derive a table.

        Args:
            launch: the call's extents, and what the mask captured.
            values: the captured values, to remember.
            max_blocks: how many blocks to make room for; None to wait for the device and make room for all.

        Raises:
            UnsupportedProblemError: the lists need 2**31 entries or more.
        """
        form, sizes = self.plan.form, TableSizes.of(self.plan.axes, launch)
        rows, columns = sizes.blocks(form, self.plan.walked)
        _log.debug("deriving a block table of %s x %s blocks", rows, columns)
        grid = (rows, sizes.heads, sizes.batch)
        tables = self._summarised(launch, sizes)
        tables |= {
            name: self._empty((sizes.batch, sizes.heads, rows), launch) for name in ("partial_counts", "full_counts")
        }
        self._run(self._source.count, grid, launch, tables)
        tables["ends"] = (tables["partial_counts"] + tables["full_counts"]).view(-1).cumsum(0, dtype=torch.int64)
        needed = tables["ends"][-1:].sum()  # 0 where there is no row
        capacity = int(needed) if max_blocks is None else max_blocks
        lists = new_lists(form, sizes, self.plan.walked, capacity, launch.device)
        torch.arange(columns, out=lists[f"{self.plan.walked.value}_indices"][:columns], device=launch.device)
        self._run(self._source.fill, grid, launch, tables | lists)
        if self._source.drop is not None:
            self._run(self._source.drop, grid, launch, lists)
        lists_of_call = expanded(lists, launch.batch, launch.q_heads)
        ready = _ready(launch.device)
        return DerivedTable(form, sizes, lists_of_call, needed, capacity, values, self.owner, ready)

    def states(self, launch: Launch, table: DerivedTable) -> torch.Tensor:
        """Return the exact state of every block, of an exact plan's table.

        Returns:
            int8 [mask batch, mask heads, rows, columns]: 0 where no pair is live, 2 where all are and the block is not
            cut by an end of the data, else 1.
        """
        assert self._source.decide is not None
        rows, columns = table.sizes.blocks(table.form)
        shape = (table.sizes.batch, table.sizes.heads, rows, columns)
        states = torch.zeros(shape, dtype=torch.int8, device=launch.device)
        grid = (rows, table.sizes.heads, table.sizes.batch)
        self._run(self._source.decide, grid, launch, {**table.lists, "states": states})
        return states

    def _summarised(self, launch: Launch, sizes: TableSizes) -> dict[str, torch.Tensor]:
        """Return the extremes of each leaf over each block of its axis."""
        tables: dict[str, torch.Tensor] = {}
        for name, source in self._source.summaries.items():
            shape = self._summary_shape(Axis(name), sizes)
            for arg in source.args:
                if arg.role is Role.TABLE:
                    tables[arg.of] = self._empty(shape, launch, _POINTED[arg.type])
            self._run(source, (shape[2], shape[1], shape[0]), launch, tables)
        return tables

    def _summary_shape(self, axis: Axis, sizes: TableSizes) -> tuple[int, int, int]:
        axes = frozenset[Axis]().union(*(leaf.node.axes for leaf in self.plan.rule.leaves_of(axis)))
        q_blocks, kv_blocks = sizes.blocks(self.plan.form)
        batch = sizes.batch if Axis.B in axes else min(sizes.batch, 1)
        heads = sizes.heads if Axis.H in axes else min(sizes.heads, 1)
        return batch, heads, q_blocks if axis is Axis.Q else kv_blocks

    @staticmethod
    def _empty(shape: Sequence[int], launch: Launch, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=launch.device)

    def _run(self, source: KernelSource, grid: tuple[int, int, int], launch: Launch, tables: Lists) -> None:
        if 0 not in grid:
            bound = bind(source.args, dataclasses.replace(launch, table=tables), {})
            self._execute[source.entry](grid, bound)


def _ready(device: torch.device) -> Ready | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return Ready(stream.record_event(), stream.device_index, stream.cuda_stream)
