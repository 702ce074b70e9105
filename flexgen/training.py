"""Backward of an attention: which kernels a call's gradients need, compiled once for each configuration."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flexgen.ir.graph import Axis
from flexgen.lowered import LoweredBackward
from flexgen.lowering.plans import AnyBackwardPlan
from flexgen.lowering.schedule import Walk
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import MOST_ROW_MULTIPLE, Accumulation, BackwardKernel
from flexgen.options import KernelOptions
from flexgen.pipeline import (
    BackwardKernels,
    TableKernel,
    Understood,
    Wanted,
    compile_backward,
    compile_table,
)
from flexgen.problem import Guard, Problem, TableForm
from flexgen.runtime.bind import bind
from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.derived_table import DerivedTable, Lists
from flexgen.runtime.describe import Launch, describe_guard, describe_problem, scalars_are_trusted
from flexgen.runtime.differentiable import Gradients, Saved
from flexgen.runtime.fixed_point import scale_for, to_float
from flexgen.runtime.kernel import Kernel, divisible_positions
from flexgen.runtime.lists import column_lists, table_lists
from flexgen.runtime.packing import Packing
from flexgen.runtime.table_cache import Values
from flexgen.tables import Tables, placeholder_lists

INPUTS = frozenset({"query", "key", "value"})


@dataclass(frozen=True, slots=True)
class Basis:
    """What the backward of a call needs to know of its forward, besides tensors.

    Attributes:
        understood: the mods and what is known of them.
        problem: the forward's.
        target: the chip.
        table: the caller's block mask, if any.
        scale, scalars: run-time numbers of the call.
        derived: the form of the table that the forward derived from the mask, or was given; then the backward kernels
            walk tables too.
        given: that table, where the caller passed it.
    """

    understood: Understood
    problem: Problem
    target: Target
    table: BlockTable | None
    scale: float
    scalars: Mapping[str, int | float]
    derived: TableForm | None = None
    given: DerivedTable | None = None


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The loaded backward kernels of one configuration, in the order in which they run."""

    delta: Kernel
    passes: tuple[tuple[Kernel, AnyBackwardPlan], ...]

    @property
    def written(self) -> frozenset[str]:
        """Names of the gradients that some kernel stores."""
        return frozenset(
            f"grad_{name}"
            for _, plan in self.passes
            for name in ("query", "key", "value")
            if getattr(plan, f"WRITE_GRAD_{name.upper()}")
        )


class Training:
    """The backward kernels of one Attention.

    Args:
        options: the backward options.
        tables: its block tables.
    """

    def __init__(self, options: KernelOptions, tables: Tables) -> None:
        self._options = options
        self._tables = tables
        self._kernels: dict[Hashable, _Kernels] = {}
        self._lock = threading.Lock()

    def backward(
        self,
        basis: Basis,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        wanted: frozenset[str],
    ) -> Gradients:
        """Return the wanted gradients by name; see `Step.backward`."""
        names = [buffer.name for buffer in basis.understood.captured.mods.buffers]
        buffers = dict(zip(names, saved.buffers, strict=True))
        task = Wanted(
            inputs=wanted & INPUTS,
            buffers=frozenset(name for index, name in enumerate(names) if f"buffer {index}" in wanted),
            from_logsumexp=grad_logsumexp is not None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        launch = _launch(basis, saved, grad_output, buffers)
        outputs = _allocate(launch, task)
        if grad_logsumexp is not None:
            outputs["grad_logsumexp"] = grad_logsumexp
        problem, guard = _described(basis, launch, outputs)
        kernels = self._compiled(basis, launch, problem, guard, task)
        lists = [self._lists(basis, launch, saved.buffers, guard, plan) for _, plan in kernels.passes]
        _run(kernels, launch, outputs, lists)
        return _collect(wanted, names, buffers, outputs)

    def lower(self, basis: Basis, forward: Launch, loss_reads_logsumexp: bool) -> LoweredBackward:
        """Return the backward kernels of a call for every tensor that requires grad, without running any.

        Args:
            forward: the call's launch; of its tensors only shapes and strides matter.
        """
        saved = _placeholders(forward)
        wanted = Wanted(
            inputs=frozenset(name for name in INPUTS if forward.tensors[name].requires_grad),
            buffers=frozenset(name for name, buffer in forward.buffers.items() if buffer.requires_grad),
            from_logsumexp=loss_reads_logsumexp,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        buffers = dict(zip(forward.buffers, saved.buffers, strict=True))
        launch = _launch(basis, saved, torch.empty_like(saved.output), buffers)
        outputs = _allocate(launch, wanted) | {"grad_logsumexp": saved.logsumexp}
        outputs |= {f"scale of {name}": saved.logsumexp for name in wanted.buffers}
        problem, guard = _described(basis, launch, outputs)
        trusted = scalars_are_trusted(launch.scalars)
        kernels = compile_backward(
            basis.understood, problem, guard, basis.target, self._options, trusted=trusted, wanted=wanted
        )
        tables = [_lower_table(basis, launch, guard, plan) for _, plan in kernels.passes]
        launches = [launch, *(replace(launch, table=lists) for _, lists in tables)]
        sources = (kernels.delta[0], *(source for source, _ in kernels.passes))
        divisible = tuple(
            divisible_positions(source.args, bind(source.args, one, outputs))
            for source, one in zip(sources, launches, strict=True)
        )
        return LoweredBackward(kernels, divisible, tuple(table for table, _ in tables))

    def _compiled(self, basis: Basis, launch: Launch, problem: Problem, guard: Guard, wanted: Wanted) -> _Kernels:
        captured = basis.understood.captured
        trusted = scalars_are_trusted(launch.scalars)
        key = (id(captured), problem, guard, basis.target.name, wanted, trusted)
        with self._lock:
            found = self._kernels.get(key)
            if found is None or found.delta.owner is not captured:
                kernels = compile_backward(
                    basis.understood, problem, guard, basis.target, self._options, trusted=trusted, wanted=wanted
                )
                found = self._kernels[key] = _load(kernels, captured)
        return found

    def _lists(
        self, basis: Basis, launch: Launch, buffers: Sequence[torch.Tensor], guard: Guard, plan: AnyBackwardPlan
    ) -> Lists:
        """Return the block lists that a kernel reads: the block mask's, or a derived table's of the kernel's tiles.

        Where the forward's tiles are of the same size, its table is found.
        """
        form, walked = _own_table(plan)
        if form is None:
            return launch.table
        if basis.given is not None and walked is Axis.KV and basis.given.form == form:
            self._tables.cache.outlive_capture(basis.given)
            return basis.given.current_lists()
        request = self._tables.request(basis.understood, launch, form, guard, basis.target, walked)
        return self._tables.lists(request, None, Values(buffers, buffers, tuple(basis.scalars.values())))


def _own_table(plan: AnyBackwardPlan) -> tuple[TableForm | None, Axis]:
    """Return the form of the derived table that a kernel walks, if it does, and which side's blocks it lists."""
    walked = Axis.KV if plan.kernel is BackwardKernel.DQ else Axis.Q
    if plan.schedule.walk is not Walk.DERIVED:
        return None, walked
    return TableForm(plan.SPARSE_Q_BLOCK_SIZE, plan.SPARSE_KV_BLOCK_SIZE, True, derived=True), walked


def _lower_table(basis: Basis, launch: Launch, guard: Guard, plan: AnyBackwardPlan) -> tuple[TableKernel | None, Lists]:
    """Return the kernels that derive a backward kernel's table, if it walks one, and its lists, without memory."""
    form, walked = _own_table(plan)
    if form is None:
        return None, launch.table
    table = compile_table(basis.understood, form, guard, basis.target, walked)
    return table, placeholder_lists(basis.understood, launch, form, walked)


def _placeholders(launch: Launch) -> Saved:
    """Return what a forward would save, with the launch's strides and without memory."""
    query, key, value = (_without_memory(launch.tensors[name]) for name in ("query", "key", "value"))
    rows = query.shape[:3]
    output = _like(query)[..., :1].expand(*rows, value.shape[3]).contiguous()
    logsumexp = query.new_empty(rows, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    buffers = tuple(_without_memory(buffer) for buffer in launch.buffers.values())
    packing = Packing(*map(_without_memory, launch.cu_seqlens.values())) if launch.cu_seqlens else None
    return Saved(query, key, value, output, logsumexp, logsumexp, buffers, packing, launch.dropout)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _load(kernels: BackwardKernels, owner: object) -> _Kernels:
    passes = tuple((Kernel(source, plan, owner), plan) for source, plan in kernels.passes)
    return _Kernels(Kernel(*kernels.delta, owner), passes)


def _run(kernels: _Kernels, launch: Launch, outputs: dict[str, torch.Tensor], lists_of_passes: Sequence[Lists]) -> None:
    """Launch every kernel; between measuring and summing in fixed point, set the scales."""
    for name in outputs.keys() & {f"grad_{name}" for name in INPUTS} - kernels.written:
        outputs[name].zero_()
    if kernels.passes:
        kernels.delta.run(launch, outputs)
    for number, ((kernel, plan), lists) in enumerate(zip(kernels.passes, lists_of_passes, strict=True)):
        if plan.accumulation is Accumulation.FIXED:
            _set_scales(kernels.passes[number:], launch, outputs)
        kernel.run(replace(launch, table=lists), outputs)


def _set_scales(
    passes: Sequence[tuple[Kernel, AnyBackwardPlan]], launch: Launch, outputs: dict[str, torch.Tensor]
) -> None:
    """Set the scale of each buffer's sums, once; `passes` are those that sum."""
    buffers = {site.buffer for _, plan in passes for site in plan.scatter}
    for name in sorted(buffers):
        if f"scale of {name}" not in outputs:
            sites = sum(site.buffer == name for _, plan in passes for site in plan.scatter)
            count = sites * launch.batch * launch.q_heads * launch.q_len * launch.kv_len
            outputs[f"scale of {name}"] = scale_for(outputs[f"largest of {name}"], count)


def _described(basis: Basis, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> tuple[Problem, Guard]:
    """Return what the plans may rely on: of the inputs and of their gradients."""
    grads = {name: outputs[name] for name in (f"grad_{name}" for name in sorted(INPUTS)) if name in outputs}
    tiles = {name: tensor for name, tensor in launch.tensors.items() if tensor.dim() == 4}
    described = replace(launch, tensors={**tiles, **grads})
    return _problem(basis, described), describe_guard(described, 0, basis.understood.facts.rows_safe)


def _launch(basis: Basis, saved: Saved, grad_output: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> Launch:
    batch, q_heads, q_len, _ = saved.query.shape
    tensors = {"query": saved.query, "key": saved.key, "value": saved.value, "grad_output": grad_output}
    tail = {} if saved.tail is None else {"logsumexp_tail": saved.tail}
    table = {**table_lists(basis.table), **column_lists(basis.table)} if basis.table else {}
    return Launch(
        batch=batch,
        q_heads=q_heads,
        kv_heads=saved.key.shape[1],
        q_len=q_len,
        kv_len=saved.key.shape[2],
        tensors={**tensors, "output": saved.output, "logsumexp": saved.logsumexp, **tail},
        scale=basis.scale,
        table=table,
        buffers=buffers,
        scalars=basis.scalars,
        dropout=saved.dropout,
        cu_seqlens=saved.packing.named if saved.packing else {},
    )


def _problem(basis: Basis, launch: Launch) -> Problem:
    return describe_problem(
        launch,
        constant_scale=basis.problem.scale is not None,
        table=basis.table.form if basis.table else basis.derived,
        output_logsumexp=False,
        output_max=False,
        has_offsets=False,
    )


def _allocate(launch: Launch, wanted: Wanted) -> dict[str, torch.Tensor]:
    """Allocate gradients: of tensors uninitialised, in their own order of heads and rows; of buffers zeroed.

    Deterministic sums of buffers are 64-bit integers; beside them goes the largest magnitude of what they sum.
    """
    query = launch.tensors["query"]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Kernels may want each head's rows to begin at a multiple; others leave the end unused.
    rows = (launch.batch, launch.q_heads, -(-launch.q_len // MOST_ROW_MULTIPLE) * MOST_ROW_MULTIPLE)
    names = ("delta", "row_shift", *["row_tail"] * ("logsumexp_tail" in launch.tensors))
    outputs = {name: query.new_empty(rows, dtype=dtype) for name in names}
    outputs |= {f"grad_{name}": _like(launch.tensors[name]) for name in sorted(wanted.inputs)}
    sums = torch.int64 if wanted.deterministic else dtype
    for name in sorted(wanted.buffers):
        buffer = launch.buffers[name]
        outputs[f"grad of {name}"] = torch.zeros(buffer.shape, dtype=sums, device=buffer.device)
        if wanted.deterministic:
            outputs[f"largest of {name}"] = query.new_zeros((), dtype=dtype)
    return outputs


def _like(tensor: torch.Tensor) -> torch.Tensor:
    b, h, s, d = tensor.shape
    if h > 1 and s > 1 and tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((b, s, h, d)).transpose(1, 2)
    return tensor.new_empty((b, h, s, d))


def _collect(
    wanted: frozenset[str], names: list[str], buffers: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> Gradients:
    found: Gradients = {name: outputs[f"grad_{name}"] for name in INPUTS & wanted}
    for index, name in enumerate(names):
        if f"buffer {index}" in wanted:
            found[f"buffer {index}"] = _sum(name, outputs).to(buffers[name].dtype)
    return found


def _sum(name: str, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    total, scale = outputs[f"grad of {name}"], outputs.get(f"scale of {name}")
    return total if scale is None else to_float(total, scale, outputs[f"largest of {name}"])
