"""A prepared launch as calls after the first make it: from tensors of a known form to the output, and little else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.runtime.prepared_step import PreparedStep
from flexgen.runtime.tensor_guard import TensorGuard


@dataclass(frozen=True, slots=True)
class Memory:
    """What a launch allocates.

    Attributes:
        shape, strides: of the output, in the caller's layout.
        scratch: elements of the query's dtype that partial rows take; None for none.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    scratch: int | None


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
    """The kernels of one form of inference call, bound.

    Args:
        steps: they have run before.
        memory: what a launch allocates.
        form: of the calls; addresses are multiples of 16.
        keep: what the form names by its identity.

    Attributes:
        rest: the form's.
    """

    def __init__(self, steps: Sequence[PreparedStep], memory: Memory, form: WarmForm, keep: object) -> None:
        self.rest = form.rest
        self._keep = keep
        self._is_of_form = TensorGuard(form.tensors).passes
        like = torch.empty_like(form.tensors[0])
        self._is_like_query = (like.shape, like.stride()) == (memory.shape, memory.strides)
        self._memory, self._scratch = memory, memory.scratch
        # What kernels take is found in a list: addresses of the tensors, three places of the launch's own, numbers.
        own = len(form.tensors)
        places = {name: number for number, name in enumerate(form.names)}
        places = {"output": own, "partials": own + 1, "v_scale": own + 2} | places
        self._steps = [step.from_list(places, len(form.names), own + 3) for step in steps]

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
    ) -> torch.Tensor:
        """Launch and return the output, in the caller's layout.

        Args:
            tensors, addresses: of the form.
            v_scale: a number, where it is one.
            scalars: captured ones.
        """
        query = tensors[0]
        output = torch.empty_like(query) if self._is_like_query else self._new_output(query)
        if self._scratch is None:
            given = [*addresses, output.data_ptr(), 0, v_scale, *scalars]
        else:
            partials = query.new_empty(self._scratch)  # lives until all is enqueued
            given = [*addresses, output.data_ptr(), partials.data_ptr(), v_scale, *scalars]
        for submit, plain, places, described in self._steps:
            values: list[Any] = plain.copy()
            for at, number in places:
                values[at] = given[number]
            if described:
                for at, name, form in described:
                    values[at] = form.at(output if name == "output" else tensors[_INPUTS[name]])
            submit(values)
        return output

    def _new_output(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_empty_strided(self._memory.shape, self._memory.strides)


_INPUTS = {"query": 0, "key": 1, "value": 2}
