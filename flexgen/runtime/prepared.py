"""A launch whose shapes, strides and kernels are settled: only addresses and captured numbers change per call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from flexgen.codegen.source import Role
from flexgen.runtime.bind import bind
from flexgen.runtime.describe import Launch
from flexgen.runtime.gluon_descriptor import descriptor_form
from flexgen.runtime.kernel import Kernel, Step
from flexgen.runtime.outputs import OutputForm
from flexgen.runtime.table_cache import TableRequest

Tensors = Mapping[str, Any]  # and the numbers that a call brings beside them
Submitter = Callable[[Sequence[object]], None]


def tensor_form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return everything about a tensor that a prepared launch depends on."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15)


class _PreparedStep:
    """One kernel with the arguments of one form of call.

    Args:
        step: what to run.
        launch, outputs: one of this form; captured values in the order a reading lists them.
        lists_change: the block lists come with each call.
    """

    def __init__(self, step: Step, launch: Launch, outputs: Tensors, *, lists_change: bool) -> None:
        args = step.args
        self._execute, self._grid = step.execute, step.grid
        # A launcher binds all but addresses and numbers once; lists that change may also change in alignment.
        self._bind = None if lists_change else getattr(step.execute, "bound", None)
        self._submit: Submitter | None = None
        self._values: list[Any] = list(bind(args, launch, outputs))
        buffers, scalars = list(launch.buffers), list(launch.scalars)
        named = (Role.TENSOR, Role.SIDE, Role.CU_SEQLENS, *([Role.SCRATCH] if launch.splits > 1 else []))
        self._tensors = [(at, arg.of) for at, arg in enumerate(args) if arg.role in named]
        self._numbers = [(at, arg.of) for at, arg in enumerate(args) if arg.role in (Role.SIDE_NUMBER, Role.DROPOUT)]
        self._buffers = [(at, buffers.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.BUFFER]
        self._scalars = [(at, scalars.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.SCALAR]
        tables = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.TABLE]
        self._tables = tables if lists_change else []
        described = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.DESCRIPTOR]
        self._described = [(at, name, descriptor_form(launch.tensors[name])) for at, name in described]
        for at, _ in (*self._tensors, *self._buffers, *self._tables, *described):
            self._values[at] = None

    def run(self, tensors: Tensors, buffers: Sequence[Any], scalars: Sequence[int | float], lists: Tensors) -> None:
        """Launch with these tensors by name, captured values, and lists of a derived table."""
        submit = self._submit
        if submit is None:
            return self._run_carefully(tensors, buffers, scalars, lists)
        values = self._values.copy()
        for at, name in self._tensors:
            values[at] = tensors[name].data_ptr()
        for at, name in self._numbers:
            values[at] = tensors[name]
        for at, index in self._buffers:
            values[at] = buffers[index].data_ptr()
        for at, name, form in self._described:
            values[at] = form.at(tensors[name])
        for at, index in self._scalars:
            values[at] = scalars[index]
        submit(values)

    def _run_carefully(
        self, tensors: Tensors, buffers: Sequence[Any], scalars: Sequence[int | float], lists: Tensors
    ) -> None:
        """Launch, and bind what later calls need not look at again."""
        values = self._values.copy()
        for at, name in (*self._tensors, *self._numbers):
            values[at] = tensors[name]
        for at, name, form in self._described:
            values[at] = form.at(tensors[name])
        for at, index in self._buffers:
            values[at] = buffers[index]
        for at, name in self._tables:
            values[at] = lists[name]
        for at, index in self._scalars:
            values[at] = scalars[index]
        self._execute(self._grid, values)
        if self._bind is not None and 0 not in self._grid:
            self._values = [_plain(value) for value in self._values]
            self._submit = self._bind(self._grid, values)


def _plain(value: Any) -> Any:
    """Return a value that stays as launchers take it: a tensor, such as a block mask's list, by its address."""
    if value is None:
        return 0
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Prepared:
    """The kernels of one form of call.

    Args:
        kernel, launch: what to run, and a launch of this form; captured values in the order a reading lists them.
        outputs: how to allocate the outputs.
        keep: objects whose identity is part of the form, kept alive.
        request: the derived table that calls need; then the lists come with each call.
    """

    def __init__(
        self,
        kernel: Kernel,
        launch: Launch,
        outputs: OutputForm,
        keep: tuple[object, ...],
        request: TableRequest | None = None,
    ) -> None:
        self.request = request
        self.basis: Any = None  # makes what the backward needs to know; set by whoever prepares
        self._outputs = outputs
        self._is_like_query = outputs.is_like(launch.tensors["query"])
        self._keep = keep
        launch = kernel.settled(launch)
        self._scratch = kernel.scratch_elements(launch)
        allocated = outputs.allocate(launch.tensors["query"].to("meta"))
        kernel.warm(launch, allocated)
        self._steps = [
            _PreparedStep(step, launch, allocated, lists_change=request is not None) for step in kernel.steps(launch)
        ]

    def run(
        self,
        tensors: dict[str, Any],
        buffers: Sequence[torch.Tensor],
        scalars: Sequence[int | float],
        lists: Tensors,
    ) -> dict[str, torch.Tensor]:
        """Launch with query, key, value and whatever else the call brings by name; return the outputs.

        Args:
            tensors: the run adds its own to them.
            buffers, scalars: captured values.
            lists: of a derived table.
        """
        query = tensors["query"]
        outputs = {"output": torch.empty_like(query)} if self._is_like_query else self._outputs.allocate(query)
        tensors.update(outputs)
        if self._scratch is not None:
            tensors["partials"] = query.new_empty(self._scratch, dtype=self._outputs.aux_dtype)
        for step in self._steps:
            step.run(tensors, buffers, scalars, lists)
        return outputs
