"""A prepared backward as calls after the first make it: from saved tensors of a known form to their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.differentiable import Gradients, Saved
from flexgen.runtime.empty import DENSE
from flexgen.runtime.prepared_step import PreparedStep, aligned_addresses
from flexgen.runtime.tensor_guard import TensorGuard

ListsOf = Callable[[Saved, Sequence[int | float], BlockTable | None], Mapping[str, torch.Tensor]]
GIVEN = ("query", "key", "value", "output", "logsumexp", "grad_output")


@dataclass(frozen=True, slots=True)
class GradientMemory:
    """What a backward allocates.

    Attributes:
        rows: a tensor that what kernels keep of rows is made like, see `shaped`: [names, B, H, rows].
        row_names: the names along its first dimension.
        inputs: for each gradient of query, key and value its name in kernels, its name among the gradients, shape,
            strides and dtype.
        sums: for each gradient of a captured tensor its name in kernels, its name among the gradients, a tensor that
            its sum is made like, and the dtype to return.
    """

    rows: torch.Tensor
    row_names: Sequence[str]
    inputs: Sequence[tuple[str, str, torch.Size, tuple[int, ...], torch.dtype]]
    sums: Sequence[tuple[str, str, torch.Tensor, torch.dtype]]


class WarmBackward:
    """The kernels of one form of backward call, bound; of calls that bring neither packing nor dropout.

    Args:
        steps: they have run before; with each what returns the block lists of a call, where they change.
        memory: what a call allocates.
        saved, grad_output: one call's.
        wanted: names of the gradients to return.
    """

    def __init__(
        self,
        steps: Sequence[tuple[PreparedStep, ListsOf | None]],
        memory: GradientMemory,
        saved: Saved,
        grad_output: torch.Tensor,
        wanted: frozenset[str],
    ) -> None:
        self._wanted = wanted
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        tensors = _listed(saved, grad_output)
        self._is_of_form = TensorGuard(tensors).passes
        self._memory = memory
        self._row_bytes = memory.rows.dtype.itemsize * memory.rows[0].numel()
        # As its tensor is, where torch then makes the same strides: in less time than by naming them.
        alike = {f"grad_{name}": getattr(saved, name) for name in ("query", "key", "value")}
        self._inputs = [
            (place, _makes(alike[name], shape, strides, dtype), name, shape, strides, dtype)
            for name, place, shape, strides, dtype in memory.inputs
        ]
        made = [*memory.row_names, *(name for name, *_ in memory.inputs), *(name for name, *_ in memory.sums)]
        names = GIVEN if saved.tail is None else (*GIVEN, "logsumexp_tail")
        places = {name: number for number, name in enumerate(names)}
        places |= {name: len(tensors) + number for number, name in enumerate(made)}
        scalars_at = len(tensors) + len(made)
        self._steps = [(step.from_list(places, len(names), scalars_at), lists_of) for step, lists_of in steps]

    def gradients(
        self,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        wanted: frozenset[str],
        scalars: Sequence[int | float],
        table: BlockTable | None,
    ) -> Gradients | None:
        """Launch every kernel and return the wanted gradients by name; None, with nothing done, for another form."""
        if grad_logsumexp is not None or saved.packing is not None or saved.dropout is not None:
            return None
        if wanted != self._wanted or torch.are_deterministic_algorithms_enabled() != self._deterministic:
            return None
        tensors = _listed(saved, grad_output)
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if together & 15 or not self._is_of_form(tensors):
            return None
        lists = [None if lists_of is None else lists_of(saved, scalars, table) for _, lists_of in self._steps]
        listed = [_NO_LISTS if one is None else aligned_addresses(one) for one in lists]
        return None if None in listed else self._run(tensors, addresses, scalars, listed)

    def _run(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        scalars: Sequence[int | float],
        listed: Sequence[Any],
    ) -> Gradients:
        rows = torch.empty_like(self._memory.rows, memory_format=DENSE)  # lives until all is enqueued
        start, given = rows.data_ptr(), list[Any](addresses)
        given += [start + number * self._row_bytes for number in range(len(self._memory.row_names))]
        found: Gradients = {}
        for place, is_alike, name, shape, strides, dtype in self._inputs:
            like = tensors[_PLACES[name]]
            found[place] = grad = (
                torch.empty_like(like) if is_alike else like.new_empty_strided(shape, strides, dtype=dtype)
            )
            given.append(grad.data_ptr())
        for _, place, like, _ in self._memory.sums:
            found[place] = total = torch.zeros_like(like, memory_format=DENSE)
            given.append(total.data_ptr())
        given += scalars
        for (step, _), lists in zip(self._steps, listed, strict=True):
            step.launch(given, lists)
        for _, place, _, dtype in self._memory.sums:
            found[place] = found[place].to(dtype)
        return found


_NO_LISTS: Mapping[str, int] = {}
_PLACES = {"grad_query": 0, "grad_key": 1, "grad_value": 2}


def _listed(saved: Saved, grad_output: torch.Tensor) -> list[torch.Tensor]:
    tensors = [saved.query, saved.key, saved.value, saved.output, saved.logsumexp, grad_output]
    if saved.tail is not None:
        tensors.append(saved.tail)
    tensors += saved.buffers
    return tensors


def _makes(tensor: torch.Tensor, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether `torch.empty_like` of a tensor has this form."""
    like = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
    return (like.shape, like.stride(), like.dtype) == (shape, strides, dtype)
