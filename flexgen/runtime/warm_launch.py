"""A prepared launch as calls after the first make it: from tensors of a known form to the output, and little else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.runtime.empty import DENSE
from flexgen.runtime.prepared_step import PreparedStep
from flexgen.runtime.table_cache import TableRequest
from flexgen.runtime.tensor_guard import TensorGuard


@dataclass(frozen=True, slots=True)
class Memory:
    """What a launch allocates.

    Attributes:
        shape, strides: of the output, in the caller's layout.
        scratch: elements of the query's dtype that partial rows take; None for none.
        logsumexp: a tensor that the logsumexp is made like, see `shaped`; None where there is none.
        tail: what rounding takes from it is wanted too.
        tail_is_written: by a kernel; else it is 0.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    scratch: int | None
    logsumexp: torch.Tensor | None = None
    tail: bool = False
    tail_is_written: bool = False


@dataclass(frozen=True, slots=True)
class WarmForm:
    """The form of a call.

    Attributes:
        tensors: one call's: query, key and value in the caller's layout, what it brings beside them, captured ones.
        names: of those that are not captured.
        rest: what decides about a call besides tensors.
    """

    tensors: Sequence[torch.Tensor]
    names: Sequence[str]
    rest: Hashable


class WarmLaunch:
    """The kernels of one form of call, bound.

    Args:
        steps: they have run before.
        memory: what a launch allocates.
        form: of the calls; addresses are multiples of 16.
        keep: what the form names by its identity.
        basis: what the backward needs to know.
        request: the derived table whose lists come with each call, if any.

    Attributes:
        rest: the form's.
        basis, request: as given.
        step: what autograd is given for each call, where that is the same for all; set by whoever makes it.
    """

    def __init__(
        self,
        steps: Sequence[PreparedStep],
        memory: Memory,
        form: WarmForm,
        keep: object,
        basis: object,
        request: TableRequest | None,
    ) -> None:
        self.rest, self.basis, self.request = form.rest, basis, request
        self.step: Any = None
        self._keep = keep
        self._is_of_form = TensorGuard(form.tensors).passes
        like = torch.empty_like(form.tensors[0])
        self._is_like_query = (like.shape, like.stride()) == (memory.shape, memory.strides)
        self._memory, self._scratch, self._logsumexp = memory, memory.scratch, memory.logsumexp
        # What kernels take is found in a list: addresses of the tensors, five places of the launch's own, numbers.
        own = len(form.tensors)
        places = {name: number for number, name in enumerate(form.names)}
        made = ("output", "partials", "v_scale", "logsumexp", "logsumexp_tail")
        places = {name: own + number for number, name in enumerate(made)} | places
        self._steps = [step.from_list(places, len(form.names), own + len(made)) for step in steps]

    def takes(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> bool:
        """Whether these tensors, at these addresses, are of the form."""
        together = 0
        for address in addresses:
            together |= address
        return not together & 15 and self._is_of_form(tensors)

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        addresses: Sequence[int],
        v_scale: float,
        scalars: Sequence[int | float],
        lists: Mapping[str, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Launch and return the output, in the caller's layout, the logsumexp and its tail where they are wanted.

        Args:
            tensors, addresses: of the form.
            v_scale: a number, where it is one.
            scalars: captured ones.
            lists: addresses of the table's lists.
        """
        query = tensors[0]
        output = torch.empty_like(query) if self._is_like_query else self._new_output(query)
        logsumexp, tail, row_address, tail_address, scratch_address = None, None, 0, 0, 0
        if self._logsumexp is not None:
            logsumexp = torch.empty_like(self._logsumexp, memory_format=DENSE)
            row_address = logsumexp.data_ptr()
            if self._memory.tail:
                tail = torch.empty_like(logsumexp) if self._memory.tail_is_written else torch.zeros_like(logsumexp)
                tail_address = tail.data_ptr()
        if self._scratch is not None:
            partials = query.new_empty(self._scratch)  # lives until all is enqueued
            scratch_address = partials.data_ptr()
        given: list[Any] = [
            *addresses,
            output.data_ptr(),
            scratch_address,
            v_scale,
            row_address,
            tail_address,
            *scalars,
        ]
        for step in self._steps:
            step.launch(given, lists)
        return output, logsumexp, tail

    def _new_output(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_empty_strided(self._memory.shape, self._memory.strides)
