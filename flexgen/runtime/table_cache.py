"""Implicit block tables: derived when a call first needs one, reused while the mask's captured values are unchanged."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from flexgen.ir.graph import Graph, Mods
from flexgen.runtime.derived_table import DerivedTable, MaskValues, TableSizes, is_capturing, refuse_capture
from flexgen.runtime.describe import Launch
from flexgen.runtime.table_kernels import TableKernels

MAX_TABLES = 12  # kept; the least recently used go first. A mask that trains has up to three
MAX_BLOCKS = (48 << 20) // 4  # listed by one implicit table, 4 bytes each; rows beyond that visit every block


@dataclass(frozen=True, slots=True)
class MaskPlaces:
    """Which of the captured values the mask reads: (name, position) in the order of `Mods.buffers` and `.scalars`."""

    buffers: tuple[tuple[str, int], ...]
    scalars: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, mods: Mods, mask: Graph) -> MaskPlaces:
        buffers, scalars = ([value.name for value in values] for values in (mods.buffers, mods.scalars))
        return cls(
            tuple((buffer.name, buffers.index(buffer.name)) for buffer in mask.buffers),
            tuple((scalar.name, scalars.index(scalar.name)) for scalar in mask.scalars),
        )


@dataclass(frozen=True, slots=True)
class Values:
    """Captured values of both mods.

    Attributes:
        given: tensors as the mods hold them, whose identity tells whether they changed.
        placed: the same on the call's device.
        scalars: numbers.
    """

    given: Sequence[torch.Tensor]
    placed: Sequence[torch.Tensor]
    scalars: Sequence[int | float]


class TableRequest:
    """The table that calls of one form need; captured values come with each call.

    Args:
        launch: a launch of that form.
        places: what the mask reads.
    """

    def __init__(self, kernels: TableKernels, launch: Launch, places: MaskPlaces) -> None:
        self.kernels, self.places = kernels, places
        device_of = {"query": torch.empty(0, device=launch.device)}  # the query itself would be kept alive
        self._launch = dataclasses.replace(launch, tensors=device_of, table={}, buffers={}, scalars={})
        self.latest: Callable[[], DerivedTable | None] = _none  # the table of the last call, while it is kept
        self.extents = (launch.batch, launch.q_heads, launch.q_len, launch.kv_len, launch.device)

    @property
    def device(self) -> torch.device:
        return self._launch.device

    def read(self, values: Values) -> tuple[list[torch.Tensor], list[int | float]]:
        """Return the tensors, as the mods hold them, and the numbers that the mask reads."""
        tensors = [values.given[place] for _, place in self.places.buffers]
        return tensors, [values.scalars[place] for _, place in self.places.scalars]

    def build(self, values: Values, max_blocks: int | None) -> DerivedTable:
        """Derive the table; see TableKernels.build."""
        buffers = {name: values.placed[place] for name, place in self.places.buffers}
        scalars = {name: values.scalars[place] for name, place in self.places.scalars}
        launch = dataclasses.replace(self._launch, buffers=buffers, scalars=scalars)
        return self.kernels.build(launch, MaskValues(*self.read(values)), max_blocks)

    def count(self) -> int:
        """Return how many blocks there are to list."""
        plan = self.kernels.plan
        return TableSizes.of(plan.axes, self._launch).count(plan.form)


def _none() -> None:
    return None


class TableCache:
    """The implicit tables of one Attention. Never waits for the device; safe from several threads."""

    def __init__(self) -> None:
        self.built = 0  # tables derived so far
        self._tables: OrderedDict[Hashable, DerivedTable] = OrderedDict()
        self._recorded: dict[int, DerivedTable] = {}
        self._lock = threading.Lock()

    def current(self, request: TableRequest, values: Values) -> DerivedTable:
        """Return the table of the mask's present values.

        Raises:
            UnsupportedProblemError: it would have to be derived while a CUDA graph is captured.
        """
        tensors, scalars = request.read(values)
        found = request.latest()
        if found is None or not found.values.can_tell or not found.values.still_hold(tensors, scalars):
            found = self._found(request, values, tensors, scalars)
            request.latest = weakref.ref(found)
        return found

    def outlive_capture(self, table: DerivedTable) -> None:
        """Keep a table for good that the current call puts into a CUDA graph, which does not keep it alive."""
        if is_capturing(table.sizes.device):
            self._recorded[id(table)] = table

    def _found(
        self, request: TableRequest, values: Values, tensors: list[torch.Tensor], scalars: list[int | float]
    ) -> DerivedTable:
        key = (id(request.kernels), request.extents, tuple(map(id, tensors)), tuple(scalars))
        with self._lock:
            found = self._tables.get(key)
            if found is None or not found.values.can_tell or not found.values.still_hold(tensors, scalars):
                found = self._build(request, values)
                self._keep(key, found)
            self._tables.move_to_end(key)
        return found

    def _build(self, request: TableRequest, values: Values) -> DerivedTable:
        refuse_capture(request.device)
        self.built += 1
        return request.build(values, min(MAX_BLOCKS, request.count()))

    def _keep(self, key: Hashable, table: DerivedTable) -> None:
        self._tables[key] = table
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
