"""Calls of a form that has run before: from the arguments to the launch with little Python in between."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flexgen.capture.live import LiveMods, Reading
from flexgen.errors import FlexgenError
from flexgen.runtime.derived_table import Lists
from flexgen.runtime.differentiable import Step, attend_unobserved, grad_is_needed
from flexgen.runtime.prepared import Prepared
from flexgen.runtime.prepared_step import aligned_addresses
from flexgen.runtime.table_cache import TableRequest, Values
from flexgen.runtime.warm_launch import WarmForm, WarmLaunch
from flexgen.torch_library.call import is_observed, refuse_unreadable

Tensor = torch.Tensor


class WarmCalls:
    """Makes the calls of one attention that bring nothing but a scale and sides.

    The form of the last one is tried first, by a guard that takes less time than making a form and looking it up.

    Args:
        mods: the attention's.
        prepared: returns the launch that was prepared for such a call, and for autograd to record if the last argument
            says so; None where there is none yet.
        scalar_form: returns what the choice of a kernel depends on in captured numbers.
        lists: returns the block lists that a request stands for, given the captured values.
        backward: returns what computes gradients of a call, see `Step.backward`, given what its launch knows for that
            and the captured numbers.
    """

    def __init__(
        self,
        mods: LiveMods,
        prepared: Callable[[Reading, Tensor, Tensor, Tensor, float | None, Mapping[str, Any], bool], Prepared | None],
        scalar_form: Callable[[Reading, Tensor, Tensor], Hashable],
        lists: Callable[[TableRequest, Values], Lists],
        backward: Callable[[Any, Sequence[int | float]], Callable[..., Any]],
    ) -> None:
        self._mods, self._prepared, self._scalar_form = mods, prepared, scalar_form
        self._lists, self._backward = lists, backward
        self._last: WarmLaunch | None = None
        self._recorded: WarmLaunch | None = None

    def output(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sides: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the output of a call; None where anything about it is unusual, and nothing has been done."""
        if not (type(query) is type(key) is type(value) is Tensor) or is_observed():
            return None
        reading = self._mods.known(torch.float32)
        if reading is None or torch._C._is_any_autocast_enabled():
            return None
        buffers, scalars = reading.buffers, reading.scalars
        records = grad_is_needed(query, key, value, buffers)
        if records and sides:
            return None
        tensors = [query, key, value]
        kinds = None
        if sides:
            tensors += [side for side in sides.values() if isinstance(side, Tensor)]
            kinds = tuple([_kind(*named) for named in sides.items()])
        if buffers:
            refuse_unreadable(buffers)
            tensors += buffers
        numbers = self._scalar_form(reading, query, key) if scalars else None
        rest = (records, id(reading.captured), scale, type(scale), kinds, numbers)
        try:
            addresses = [tensor.data_ptr() for tensor in tensors]
            warm = self._recorded if records else self._last
            if warm is None or warm.rest != rest or not warm.takes(tensors, addresses):
                if any(tensor.is_neg() for tensor in tensors):
                    return None
                prepared = self._prepared(reading, query, key, value, scale, sides, records)
                names = ("query", "key", "value", *(name for name, side in sides.items() if isinstance(side, Tensor)))
                warm = None if prepared is None else prepared.warmed(WarmForm(tensors, names, rest))
                if warm is None or not warm.takes(tensors, addresses):
                    return None
                if records:
                    self._recorded = warm
                else:
                    self._last = warm
        except FlexgenError:
            raise
        except RuntimeError:  # of tensors without addresses, shapes or strides, which are refused elsewhere
            return None
        lists: Lists = _NO_LISTS  # alive until all is enqueued
        listed = _NO_ADDRESSES
        if warm.request is not None:
            lists = self._lists(warm.request, Values(buffers, buffers, scalars))
            found = aligned_addresses(lists)
            if found is None:
                return None
            listed = found
        if records:
            return self._record(warm, tensors, scalars, listed)
        v_scale = sides.get("v_scale") if sides else None
        return warm.run(tensors, addresses, v_scale if isinstance(v_scale, float | int) else 0.0, scalars, listed)[0]

    def _record(
        self, warm: WarmLaunch, tensors: Sequence[Tensor], scalars: Sequence[int | float], lists: Mapping[str, int]
    ) -> Tensor:
        """Make a call under autograd."""
        step = warm.step
        if step is None:
            step = Step(partial(_launched, warm, scalars, lists), self._backward(warm.basis, scalars))
            if not scalars and not lists:
                warm.step = step
        return attend_unobserved(step, tensors)


_NO_LISTS: Lists = {}
_NO_ADDRESSES: Mapping[str, int] = {}


def _launched(
    warm: WarmLaunch, scalars: Sequence[int | float], lists: Mapping[str, int], tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    output, logsumexp, tail = warm.run(tensors, [tensor.data_ptr() for tensor in tensors], 0.0, scalars, lists)
    assert logsumexp is not None, "what autograd records keeps it"
    outputs = {"output": output, "logsumexp": logsumexp}
    return outputs if tail is None else outputs | {"logsumexp_tail": tail}


def _kind(name: str, side: Any) -> Hashable:
    """Return what decides of a side but a tensor's form: of k_scale, which is part of the scale, the number."""
    kind = type(side)
    return name if kind is Tensor else (name, kind, side if name == "k_scale" else None)
