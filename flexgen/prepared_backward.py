"""The backward of one form of call: its kernels in order, what they write, and the block lists they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexgen.lowering.plans import AnyBackwardPlan
from flexgen.lowering.triton.backward_plan import MOST_ROW_MULTIPLE, Accumulation
from flexgen.pipeline import Wanted
from flexgen.problem import TableForm
from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.derived_table import DerivedTable, Lists
from flexgen.runtime.describe import Launch
from flexgen.runtime.differentiable import Gradients, Saved
from flexgen.runtime.dropout import SEED
from flexgen.runtime.empty import shaped
from flexgen.runtime.fixed_point import scale_for, to_float
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.lists import column_lists, table_lists
from flexgen.runtime.prepared_step import PreparedStep
from flexgen.runtime.table_cache import TableRequest, Values
from flexgen.runtime.warm_backward import GradientMemory, ListsOf, WarmBackward
from flexgen.tables import Tables

INPUTS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Pass:
    """One of the kernels behind the one that prepares rows.

    Attributes:
        lists: the block lists of a launch, with memory or without.
        request: the derived table that it walks, if it does.
        form: that table's.
        takes_given: a derived table of this form that the caller gave serves as well.
    """

    kernel: Kernel
    plan: AnyBackwardPlan
    lists: Lists
    request: TableRequest | None
    form: TableForm | None
    takes_given: bool


@dataclass(frozen=True, slots=True)
class GradientForm:
    """How the gradients of a call are allocated.

    Attributes:
        rows: shape of what the kernels keep of each row, [B, H, padded rows].
        row_names: those, in the accumulator's dtype.
        inputs: name, shape, strides and dtype of the gradients of query, key and value; not initialised.
        sums: name, shape and dtype of what is summed for captured tensors; zero at first.
        accumulator: dtype of sums.
    """

    rows: tuple[int, int, int]
    row_names: tuple[str, ...]
    inputs: tuple[tuple[str, torch.Size, tuple[int, ...], torch.dtype], ...]
    sums: tuple[tuple[str, torch.Size, torch.dtype], ...]
    accumulator: torch.dtype

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what the kernels write, by name."""
        rows = torch.empty((len(self.row_names), *self.rows), dtype=self.accumulator, device=device)
        outputs = dict(zip(self.row_names, rows.unbind(), strict=True))
        for name, shape, strides, dtype in self.inputs:
            outputs[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for name, shape, dtype in self.sums:
            outputs[name] = torch.zeros(shape, dtype=dtype, device=device)
        return outputs


def gradient_form(launch: Launch, wanted: Wanted) -> GradientForm:
    """Return the form of a launch's gradients: of tensors in their own order of heads and rows.

    Deterministic sums of captured tensors are 64-bit integers; beside them goes the largest magnitude of what they sum.
    """
    dtype = torch.float64 if launch.tensors["query"].dtype == torch.float64 else torch.float32
    # Kernels may want each head's rows to begin at a multiple; others leave the end unused.
    rows = (launch.batch, launch.q_heads, -(-launch.q_len // MOST_ROW_MULTIPLE) * MOST_ROW_MULTIPLE)
    sums: list[tuple[str, torch.Size, torch.dtype]] = []
    for name in sorted(wanted.buffers):
        sums.append((f"grad of {name}", launch.buffers[name].shape, torch.int64 if wanted.deterministic else dtype))
        if wanted.deterministic:
            sums.append((f"largest of {name}", torch.Size(), dtype))
    tensors = {f"grad_{name}": launch.tensors[name] for name in sorted(wanted.inputs)}
    return GradientForm(
        rows,
        ("delta", "row_shift", *["row_tail"] * ("logsumexp_tail" in launch.tensors)),
        tuple((name, tensor.shape, own_order(tensor), tensor.dtype) for name, tensor in tensors.items()),
        tuple(sums),
        dtype,
    )


def own_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides of a dense [B, H, L, D] tensor with heads and rows in memory in the order of this one's."""
    _, h, s, d = tensor.shape
    if h > 1 and s > 1 and tensor.stride(1) < tensor.stride(2):
        return (s * h * d, d, h * d, 1)
    return (h * s * d, s * d, d, 1)


class PreparedBackward:
    """The backward launches of one form of call.

    Args:
        delta: the kernel that prepares rows.
        passes: the others, in order.
        launch, outputs: one of this form, and what the kernels write.
        form: how that is allocated.
        wanted: the gradients to return, as `Step.backward` names them.
        table: the caller's block mask, if any.
        tables: the attention's.
        lists_change: its lists come with each call.
    """

    def __init__(
        self,
        delta: Kernel,
        passes: Sequence[Pass],
        launch: Launch,
        outputs: Mapping[str, torch.Tensor],
        form: GradientForm,
        wanted: frozenset[str],
        table: BlockTable | None,
        tables: Tables,
        *,
        lists_change: bool = False,
    ) -> None:
        self.kernel = delta
        self._form, self._tables = form, tables
        # Lists by columns that the block mask lacks are derived anew each time: its own may be changed in place.
        self._columns_of = table if table is not None and not lists_change and _lacks_columns(table) else None
        self._lists_change = lists_change
        self._delta = PreparedStep(delta.step(launch), launch, outputs, lists_change=False) if passes else None
        self._passes = [(one, self._step(one, launch, outputs)) for one in passes]
        self._unwritten = [name for name, *_ in form.inputs if not any(_writes(one.plan, name) for one in passes)]
        names = list(launch.buffers)
        self._inputs = [(name, f"grad_{name}") for name in INPUTS if name in wanted]
        self._buffers = [
            (f"buffer {at}", name, launch.buffers[name].dtype)
            for at, name in enumerate(names)
            if f"buffer {at}" in wanted
        ]
        fixed = [one.plan.accumulation is Accumulation.FIXED for one in passes]
        self._first_sum = fixed.index(True) if True in fixed else None
        self._scales = _scale_counts(passes, launch)
        self._wanted = wanted
        measures = len(form.sums) != len(self._buffers)  # for sums in fixed point
        has_more = launch.dropout is not None or bool(launch.cu_seqlens) or measures
        self._may_be_warm = bool(passes) and not (has_more or self._unwritten or self._columns_of is not None)
        self._warm: WarmBackward | None = None

    def _step(self, one: Pass, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> PreparedStep:
        lists_change = one.request is not None or self._columns_of is not None or self._lists_change
        launch = replace(launch, table=one.lists)
        return PreparedStep(one.kernel.step(launch), launch, outputs, lists_change=lists_change)

    def run(
        self,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        scalars: Sequence[int | float],
        given: DerivedTable | None,
        table: BlockTable | None,
    ) -> Gradients:
        """Launch every kernel and return the wanted gradients by name.

        Args:
            saved, grad_output, grad_logsumexp: of this form.
            scalars: captured numbers.
            given: the derived table that the caller gave, if any.
            table: the block mask, where its lists come with each call.
        """
        outputs = self._form.allocate(grad_output.device)
        for name in self._unwritten:
            outputs[name].zero_()
        if self._delta is None:
            return self._collected(outputs)
        named: dict[str, Any] = {
            "query": saved.query,
            "key": saved.key,
            "value": saved.value,
            "output": saved.output,
            "logsumexp": saved.logsumexp,
            "logsumexp_tail": saved.tail,
            "grad_output": grad_output,
            "grad_logsumexp": grad_logsumexp,
            **outputs,
        }
        if saved.packing is not None:
            named |= saved.packing.named
        if saved.dropout is not None:
            named |= {SEED: saved.dropout.seed, **saved.dropout.numbers()}
        self._delta.run(named, saved.buffers, scalars, {})
        for number, (one, step) in enumerate(self._passes):
            if number == self._first_sum:
                named |= self._set_scales(outputs)
            step.run(named, saved.buffers, scalars, self._lists(one, saved, scalars, given, table))
        return self._collected(outputs)

    def warmed(self, saved: Saved, grad_output: torch.Tensor) -> WarmBackward | None:
        """Return the same without looking at anything again; None where that is not possible, or not yet.

        Args:
            saved, grad_output: of this form.
        """
        if self._warm is None and self._may_be_warm and self._delta is not None:
            steps: list[tuple[PreparedStep, ListsOf | None]] = [(self._delta, None)]
            steps += [(step, self._lists_of(one)) for one, step in self._passes]
            if all(step.is_bound for step, _ in steps):
                self._warm = WarmBackward(steps, self._memory(grad_output.device), saved, grad_output, self._wanted)
        return self._warm

    def _lists_of(self, one: Pass) -> ListsOf | None:
        """Return what tells a pass's lists of a call, where they change."""
        if self._lists_change:
            return lambda saved, scalars, table: self._lists(one, saved, scalars, None, table)
        if one.request is not None:
            return lambda saved, scalars, table: self._derived(one, saved, scalars)
        return None

    def _derived(self, one: Pass, saved: Saved, scalars: Sequence[int | float]) -> Lists:
        """Return the lists of the derived table of a call."""
        return self._tables.lists(one.request, None, Values(saved.buffers, saved.buffers, scalars))

    def _memory(self, device: torch.device) -> GradientMemory:
        form = self._form
        sums = {f"grad of {name}": (place, dtype) for place, name, dtype in self._buffers}
        places = {grad: name for name, grad in self._inputs}
        return GradientMemory(
            shaped((len(form.row_names), *form.rows), form.accumulator, device),
            form.row_names,
            [(name, places[name], shape, strides, dtype) for name, shape, strides, dtype in form.inputs],
            [(name, sums[name][0], shaped(shape, dtype, device), sums[name][1]) for name, shape, dtype in form.sums],
        )

    def _set_scales(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the scales of sums in fixed point, which the passes so far have measured for."""
        scales = {f"scale of {name}": scale_for(outputs[f"largest of {name}"], count) for name, count in self._scales}
        outputs |= scales
        return scales

    def _lists(
        self,
        one: Pass,
        saved: Saved,
        scalars: Sequence[int | float],
        given: DerivedTable | None,
        table: BlockTable | None,
    ) -> Mapping[str, torch.Tensor]:
        """Return the block lists of a call: the block mask's, or a derived table's of the kernel's tiles.

        Where the forward's tiles are of the same size, its table is found.
        """
        table = table or self._columns_of
        if table is not None:
            return {**table_lists(table), **column_lists(table)}
        if one.request is None:
            return one.lists
        if one.takes_given and given is not None and given.form == one.form:
            self._tables.cache.outlive_capture(given)
            return given.current_lists()
        return self._derived(one, saved, scalars)

    def _collected(self, outputs: Mapping[str, torch.Tensor]) -> Gradients:
        found: Gradients = {name: outputs[grad] for name, grad in self._inputs}
        for place, name, dtype in self._buffers:
            found[place] = _total(name, outputs).to(dtype)
        return found


def _writes(plan: AnyBackwardPlan, grad: str) -> bool:
    return bool(getattr(plan, f"WRITE_{grad.upper()}"))


def _lacks_columns(table: BlockTable) -> bool:
    return table.q_num_blocks is None or (table.full_kv_num_blocks is not None and table.full_q_num_blocks is None)


def _scale_counts(passes: Sequence[Pass], launch: Launch) -> list[tuple[str, int]]:
    """Return how many values meet in a sum of each captured tensor that is summed in fixed point."""
    sites = [site.buffer for one in passes if one.plan.accumulation is Accumulation.FIXED for site in one.plan.scatter]
    pairs = launch.batch * launch.q_heads * launch.q_len * launch.kv_len
    return [(name, sites.count(name) * pairs) for name in sorted(set(sites))]


def _total(name: str, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    total, scale = outputs[f"grad of {name}"], outputs.get(f"scale of {name}")
    return total if scale is None else to_float(total, scale, outputs[f"largest of {name}"])
