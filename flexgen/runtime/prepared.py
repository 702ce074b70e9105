"""A launch whose shapes, strides and kernels are settled: only addresses and captured numbers change per call."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from flexgen.options import Layout
from flexgen.runtime.describe import Launch
from flexgen.runtime.empty import shaped
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.outputs import OutputForm
from flexgen.runtime.prepared_step import PreparedStep
from flexgen.runtime.table_cache import TableRequest
from flexgen.runtime.warm_launch import Memory, WarmForm, WarmLaunch

Named = Mapping[str, Any]  # tensors and numbers by name


def tensor_form(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return everything about a tensor that a prepared launch depends on."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() & 15)


class Prepared:
    """The kernels of one form of call.

    Args:
        kernel, launch: what to run, and a launch of this form; captured values in the order a reading lists them.
        outputs: how to allocate the outputs.
        layout: of the caller's tensors.
        keep: objects whose identity is part of the form, kept alive.
        request: the derived table that calls need; then the lists come with each call.
        lists_change: the lists of a block mask come with each call.
    """

    def __init__(
        self,
        kernel: Kernel,
        launch: Launch,
        outputs: OutputForm,
        layout: Layout,
        keep: tuple[object, ...],
        request: TableRequest | None = None,
        *,
        lists_change: bool = False,
    ) -> None:
        self.kernel, self.request = kernel, request
        lists_change = lists_change or request is not None
        self.basis: Any = None  # makes what the backward needs to know; set by whoever prepares
        self._warm: WarmLaunch | None = None
        self._outputs, self._layout = outputs, layout
        has_more = bool(outputs.max_scores or launch.dropout is not None or launch.cu_seqlens)
        self._may_be_warm = not has_more
        self._keep = keep
        launch = kernel.settled(launch)
        self._scratch = kernel.scratch_elements(launch)
        allocated = outputs.allocate(launch.tensors["query"].to("meta"))
        kernel.warm(launch, allocated)
        self._steps = [
            PreparedStep(step, launch, allocated, lists_change=lists_change) for step in kernel.steps(launch)
        ]

    def run(
        self,
        tensors: dict[str, Any],
        buffers: Sequence[torch.Tensor],
        scalars: Sequence[int | float],
        lists: Named,
    ) -> dict[str, torch.Tensor]:
        """Launch with query, key, value and whatever else the call brings by name; return the outputs.

        Args:
            tensors: the run adds its own to them.
            buffers, scalars: captured values.
            lists: of a derived table.
        """
        query = tensors["query"]
        outputs = self._outputs.allocate(query)
        tensors.update(outputs)
        if self._scratch is not None:
            tensors["partials"] = query.new_empty(self._scratch, dtype=self._outputs.aux_dtype)
        for step in self._steps:
            step.run(tensors, buffers, scalars, lists)
        return outputs

    def warmed(self, form: WarmForm) -> WarmLaunch | None:
        """Return the same launch without looking at anything again; None where that is not possible, or not yet.

        Args:
            form: of calls with this launch.
        """
        if self._warm is None and self._may_be_warm and all(step.is_bound for step in self._steps):
            query = form.tensors[0]
            made = self._outputs.allocate(query.to("meta"))
            output = made["output"] if self._layout == "bhsd" else made["output"].transpose(1, 2)
            rows = made.get("logsumexp")
            logsumexp = None if rows is None else shaped(rows.shape, rows.dtype, query.device)
            scratch, tail = self._scratch_in(query.dtype), self._outputs.tail
            written = any(step.takes("logsumexp_tail") for step in self._steps)
            memory = Memory(output.shape, output.stride(), scratch, logsumexp, tail=tail, tail_is_written=written)
            self._warm = WarmLaunch(self._steps, memory, form, self._keep, self.basis, self.request)
        return self._warm

    def _scratch_in(self, dtype: torch.dtype) -> int | None:
        """Return the elements of a dtype, no larger than the scratch's own, that the scratch takes."""
        return None if self._scratch is None else self._scratch * (self._outputs.aux_dtype.itemsize // dtype.itemsize)
