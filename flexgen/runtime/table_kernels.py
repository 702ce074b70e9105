"""Runs the kernels that derive a block table: extremes of the leaves, counts, then the lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flexgen.codegen.block_table_emit import TableSource
from flexgen.codegen.source import KernelSource, Role
from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Axis
from flexgen.lowering.table_plan import TablePlan
from flexgen.runtime.bind import bind
from flexgen.runtime.derived_table import DerivedTable, MaskValues, Ready, TableSizes
from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import executor

MAX_ENTRIES = (1 << 31) - 1  # offsets into the list are int32
_POINTED = {"*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32, "*fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class TableInputs:
    """What a table is derived from.

    Attributes:
        batch, heads: of the call.
        buffers, scalars: captured values by name.
        values: the same, as they are remembered.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: torch.device
    buffers: Mapping[str, torch.Tensor]
    scalars: Mapping[str, int | float]
    values: MaskValues


class TableKernels:
    """The kernels of one form of table.

    Args:
        owner: the captured mods whose mask it is.
    """

    def __init__(self, source: TableSource, plan: TablePlan, owner: object) -> None:
        self.plan, self.owner = plan, owner
        self._source = source
        entries = (*source.summaries.values(), source.count, source.fill)
        options = {"num_warps": plan.num_warps, "num_stages": 1}
        self._execute = {entry.entry: executor(entry, plan.target, options) for entry in entries}

    def sizes(self, inputs: TableInputs) -> TableSizes:
        """Return the extents of the table of a call."""
        axes = self.plan.rule.axes
        batch = inputs.batch if Axis.B in axes else min(inputs.batch, 1)
        heads = inputs.heads if Axis.H in axes else min(inputs.heads, 1)
        return TableSizes(batch, heads, inputs.q_len, inputs.kv_len, inputs.device)

    def build(self, inputs: TableInputs, max_blocks: int | None) -> DerivedTable:
        """Derive a table.

        Args:
            max_blocks: how many blocks to make room for; None to wait for the device and make room for all.

        Raises:
            UnsupportedProblemError: the lists need 2**31 entries or more.
        """
        sizes = self.sizes(inputs)
        workspace = self._summarised(inputs, sizes)
        rows, columns = self._extents(sizes)
        shape = (sizes.batch, sizes.heads, rows)
        for name in ("partial_counts", "full_counts"):
            workspace[name] = torch.empty(shape, dtype=torch.int32, device=sizes.device)
        grid = (rows, sizes.heads, sizes.batch)
        self._run(self._source.count, grid, inputs, workspace)
        counts = workspace["partial_counts"] + workspace["full_counts"]
        workspace["ends"] = counts.view(-1).cumsum(0, dtype=torch.int64)
        needed = workspace["ends"][-1] if counts.numel() else torch.zeros((), dtype=torch.int64, device=sizes.device)
        capacity = int(needed) if max_blocks is None else max_blocks
        lists = self._new_lists(shape, columns, capacity, sizes.device)
        self._run(self._source.fill, grid, inputs, workspace | lists)
        return self._table(inputs, sizes, lists, needed.clone(), capacity)

    def all_blocks(self, inputs: TableInputs) -> int:
        """Return how many blocks there are for a table to list."""
        sizes = self.sizes(inputs)
        rows, columns = self._extents(sizes)
        return sizes.batch * sizes.heads * rows * columns

    def placeholders(self, inputs: TableInputs) -> dict[str, torch.Tensor]:
        """Return lists of the right shapes without memory, for lowering."""
        sizes = self.sizes(inputs)
        rows, columns = self._extents(sizes)
        lists = self._new_lists((sizes.batch, sizes.heads, rows), columns, 0, torch.device("meta"))
        return self._expanded(lists, inputs)

    def _extents(self, sizes: TableSizes) -> tuple[int, int]:
        """Return how many lists there are a head, and how many blocks one may hold."""
        q_blocks, kv_blocks = (
            -(-sizes.q_len // self.plan.q_block_size),
            -(-sizes.kv_len // self.plan.kv_block_size),
        )
        return (q_blocks, kv_blocks) if self.plan.walked is Axis.KV else (kv_blocks, q_blocks)

    def _summarised(self, inputs: TableInputs, sizes: TableSizes) -> dict[str, torch.Tensor]:
        """Return the extremes of each leaf over each block of its axis."""
        workspace: dict[str, torch.Tensor] = {}
        for name, source in self._source.summaries.items():
            axis = Axis(name)
            axes = frozenset[Axis]().union(*(leaf.node.axes for leaf in self.plan.rule.leaves_of(axis)))
            length, size = (
                (sizes.q_len, self.plan.q_block_size) if axis is Axis.Q else (sizes.kv_len, self.plan.kv_block_size)
            )
            batch = sizes.batch if Axis.B in axes else min(sizes.batch, 1)
            heads = sizes.heads if Axis.H in axes else min(sizes.heads, 1)
            shape = (batch, heads, -(-length // size))
            for arg in source.args:
                if arg.role is Role.TABLE:
                    workspace[arg.of] = torch.empty(shape, dtype=_POINTED[arg.type], device=sizes.device)
            self._run(source, (shape[2], heads, batch), inputs, workspace)
        return workspace

    def _new_lists(
        self, shape: tuple[int, int, int], columns: int, capacity: int, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return empty lists; kv_indices begins with every block, for rows whose own list does not fit."""
        if columns + capacity > MAX_ENTRIES:
            raise UnsupportedProblemError(
                f"the block table needs {capacity} entries",
                why="a row's list is found by a 32-bit offset",
                fix="use larger blocks (BLOCK_M, BLOCK_N), or a mask that does not depend on batch and head",
            )
        axis = self.plan.walked.value
        names = (f"{axis}_num_blocks", f"full_{axis}_num_blocks", f"{axis}_offsets")
        lists = {name: torch.empty(shape, dtype=torch.int32, device=device) for name in names}
        indices = torch.empty(columns + capacity, dtype=torch.int32, device=device)
        torch.arange(columns, dtype=torch.int32, device=device, out=indices[:columns])
        return lists | {f"{axis}_indices": indices}

    def _run(
        self, source: KernelSource, grid: tuple[int, int, int], inputs: TableInputs, tables: Mapping[str, torch.Tensor]
    ) -> None:
        launch = Launch(
            batch=inputs.batch,
            q_heads=inputs.heads,
            kv_heads=inputs.heads,
            q_len=inputs.q_len,
            kv_len=inputs.kv_len,
            tensors={},
            scale=1.0,
            table=tables,
            buffers=inputs.buffers,
            scalars=inputs.scalars,
        )
        if 0 not in grid:
            self._execute[source.entry](grid, bind(source.args, launch, {}))

    @staticmethod
    def _expanded(lists: Mapping[str, torch.Tensor], inputs: TableInputs) -> dict[str, torch.Tensor]:
        """Return the lists by row expanded to the call's batch and heads."""
        return {
            name: tensor if tensor.dim() == 1 else tensor.expand(inputs.batch, inputs.heads, -1)
            for name, tensor in lists.items()
        }

    def _table(
        self, inputs: TableInputs, sizes: TableSizes, lists: Mapping[str, torch.Tensor], needed: torch.Tensor, room: int
    ) -> DerivedTable:
        return DerivedTable(
            form=self.plan.form,
            sizes=sizes,
            lists=self._expanded(lists, inputs),
            needed=needed,
            capacity=room,
            values=inputs.values,
            owner=self.owner,
            ready=_ready(sizes.device),
        )


def _ready(device: torch.device) -> Ready | None:
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return Ready(stream.record_event(), stream.cuda_stream)
