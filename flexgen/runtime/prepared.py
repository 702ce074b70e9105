"""A launch whose shapes, strides and kernel are settled: only addresses and captured numbers change per call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from flexgen.codegen.source import Role
from flexgen.runtime.bind import bind
from flexgen.runtime.describe import Launch
from flexgen.runtime.dropout import SEED, Dropout
from flexgen.runtime.gluon_descriptor import descriptor_form
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.outputs import OutputForm
from flexgen.runtime.packing import Packing
from flexgen.runtime.table_cache import TableRequest


def tensor_form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return everything about a tensor that a prepared launch depends on."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15)


class Prepared:
    """One kernel with the arguments of one form of call.

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
        args = kernel.args
        self._outputs = outputs
        self._execute = kernel.execute
        self._grid = kernel.grid(launch)
        self._keep = keep
        self._values: list[Any] = list(bind(args, launch, outputs.allocate(launch.tensors["query"].to("meta"))))
        buffers, scalars = list(launch.buffers), list(launch.scalars)
        self._tensors = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.TENSOR]
        self._buffers = [(at, buffers.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.BUFFER]
        self._scalars = [(at, scalars.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.SCALAR]
        self._dropout = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.DROPOUT]
        tables = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.TABLE]
        self._tables = tables if request is not None else []
        self._offsets = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.CU_SEQLENS]
        described = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.DESCRIPTOR]
        self._described = [(at, name, descriptor_form(launch.tensors[name])) for at, name in described]
        for at, _ in (*self._tensors, *self._buffers, *self._tables, *self._offsets, *described):
            self._values[at] = None

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        scalars: Sequence[int | float],
        lists: Mapping[str, torch.Tensor],
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> dict[str, torch.Tensor]:
        """Launch and return the outputs.

        Args:
            query, key, value, buffers, scalars: the call's tensors and captured values.
            lists: of a derived table.
            packing: where packed sequences begin.
            dropout: what is dropped.
        """
        outputs = self._outputs.allocate(query)
        tensors = {"query": query, "key": key, "value": value, **outputs}
        values = self._values.copy()
        if dropout is not None:
            tensors[SEED], numbers = dropout.seed, dropout.numbers()
            for at, name in self._dropout:
                values[at] = numbers[name]
        for at, name in self._tensors:
            values[at] = tensors[name]
        for at, name, form in self._described:
            values[at] = form.at(tensors[name])
        for at, index in self._buffers:
            values[at] = buffers[index]
        for at, name in self._tables:
            values[at] = lists[name]
        if packing is not None:
            offsets = packing.named
            for at, name in self._offsets:
                values[at] = offsets[name]
        for at, index in self._scalars:
            values[at] = scalars[index]
        self._execute(self._grid, values)
        return outputs
