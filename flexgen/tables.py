"""An Attention's block tables: which calls get one, the kernels that derive it, and its lists at each call."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Axis
from flexgen.lowering.table_plan import drops_empty, table_axes
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.choose_table import table_form
from flexgen.options import KernelOptions
from flexgen.pipeline import Understood, compile_table, implicit_table
from flexgen.problem import Guard, Problem, TableForm
from flexgen.runtime.derived_table import DerivedTable, Lists, TableSizes, expanded, new_lists
from flexgen.runtime.describe import Launch, scalars_are_trusted
from flexgen.runtime.table_cache import MaskPlaces, TableCache, TableRequest, Values
from flexgen.runtime.table_kernels import TableKernels


class Tables:
    """Block tables of one Attention, implicit ones kept while they hold."""

    def __init__(self, options: KernelOptions) -> None:
        self.cache = TableCache()
        self._options = options
        self._kernels: dict[Hashable, TableKernels] = {}
        self._lock = threading.Lock()

    def implicit(
        self, understood: Understood, launch: Launch, problem: Problem, guard: Guard, target: Target
    ) -> TableForm | None:
        """Return the form of the table that a call without one derives for itself, if it does."""
        trusted = scalars_are_trusted(launch.scalars)
        return implicit_table(understood, problem, guard, target, self._options, trusted).form

    def explicit(
        self, understood: Understood, launch: Launch, problem: Problem, guard: Guard, target: Target
    ) -> TableRequest | None:
        """Return what makes a table on request; None where a table would tell a kernel nothing."""
        rule, form = understood.rule, table_form(problem, target, self._options)
        if rule is None or guard.crowded or not scalars_are_trusted(launch.scalars):
            return None
        if rule.tells_nothing and not drops_empty(rule, form):
            return None
        return self.request(understood, launch, form, guard, target)

    def request(
        self,
        understood: Understood,
        launch: Launch,
        form: TableForm,
        guard: Guard,
        target: Target,
        walked: Axis = Axis.KV,
    ) -> TableRequest:
        """Return what derives tables of a form for calls like the launch.

        Args:
            walked: KV for lists of keys by blocks of queries, Q for lists of queries by blocks of keys.
        """
        mods = understood.mods
        assert mods.mask is not None
        captured = understood.captured
        names = {buffer.name for buffer in mods.mask.buffers} | {scalar.name for scalar in mods.mask.scalars}
        guard = replace(guard, wide=guard.wide & names)  # so that forward and backward share tables
        key = (id(captured), form, target.name, guard.wide, guard.wide_index, walked)
        with self._lock:
            kernels = self._kernels.get(key)
            if kernels is None or kernels.owner is not captured:
                emitted = compile_table(understood, form, guard, target, walked)
                kernels = self._kernels[key] = TableKernels(emitted.source, emitted.plan, captured)
        return TableRequest(kernels, launch, MaskPlaces.of(captured.mods, mods.mask))

    def lists(self, request: TableRequest | None, table: object, values: Values) -> Lists:
        """Return the lists that a call reads, from the given table or an implicit one; none without a request."""
        if request is None:
            return {}
        if not isinstance(table, DerivedTable):
            table = self.cache.current(request, values)
        elif not table.values.still_hold(*request.read(values)):
            raise UnsupportedProblemError(
                "the block table was made for other values of what the mask captured",
                why="its lists may leave out blocks that the mask now lets through",
                fix="make it again with attention.block_table(query, key) after changing them",
            )
        self.cache.outlive_capture(table)
        return table.current_lists()


def placeholder_lists(understood: Understood, launch: Launch, form: TableForm, walked: Axis = Axis.KV) -> Lists:
    """Return lists of the shapes that a derived table has, without memory."""
    assert understood.rule is not None
    sizes = TableSizes.of(table_axes(understood.rule, form), launch)
    return expanded(new_lists(form, sizes, walked, 0, torch.device("meta")), launch.batch, launch.q_heads)


def check_derived(table: DerivedTable, captured: object, query: torch.Tensor, kv_len: int) -> None:
    """Refuse a table that was made by another attention, or for other extents.

    Args:
        query: in [B, H, L, D] order.
        kv_len: keys that there is room for.

    Raises:
        UnsupportedProblemError: says what differs.
    """
    sizes, kind = table.sizes, query.device.type
    if table.owner is not captured:
        raise UnsupportedProblemError(
            "the block table was made for another mask",
            why="it belongs to the Attention that made it, while the numbers its mask uses are unchanged",
            fix="make it with this attention's block_table(query, key)",
        )
    made_for = (table.lists["kv_num_blocks"].shape[:2], sizes.q_len, sizes.kv_len)
    if made_for != (query.shape[:2], query.shape[2], kv_len) or (kind != "meta" and sizes.device != query.device):
        batch, heads = made_for[0]
        raise UnsupportedProblemError(
            f"the block table was made for batch {batch}, {heads} heads, {sizes.q_len} queries and {sizes.kv_len} keys "
            f"on {sizes.device}",
            why=f"the call has query {tuple(query.shape)} and {kv_len} keys on {query.device}",
            fix="make one table for each of the extents",
        )
