"""A launch whose shapes, strides and kernels are settled: only addresses and captured numbers change per call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.outputs import OutputForm
from flexgen.runtime.prepared_step import PreparedStep
from flexgen.runtime.table_cache import TableRequest

Tensors = Mapping[str, Any]  # and the numbers that a call brings beside them


def tensor_form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return everything about a tensor that a prepared launch depends on."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15)


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
        self.columns_outside = outputs.columns_outside
        self._outputs = outputs
        self._is_like_query = outputs.is_like_query
        self._keep = keep
        launch = kernel.settled(launch)
        self._scratch = kernel.scratch_elements(launch)
        allocated = outputs.allocate(launch.tensors["query"].to("meta"))
        kernel.warm(launch, allocated)
        self._steps = [
            PreparedStep(step, launch, allocated, lists_change=request is not None) for step in kernel.steps(launch)
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
