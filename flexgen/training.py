"""Backward of an attention: which kernels a call's gradients need, compiled once for each configuration."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import torch

from flexgen.collector import collector_paused
from flexgen.errors import FlexgenError, NoFeasiblePlanError, OptionError, OutOfResourcesError
from flexgen.fitting import Fitting, nothing_smaller
from flexgen.ir.graph import Axis
from flexgen.lowered import LoweredBackward
from flexgen.lowering.plans import AnyBackwardPlan
from flexgen.lowering.schedule import Walk
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.options import KernelOptions
from flexgen.pipeline import BackwardKernels, TableKernel, Understood, Wanted, compile_backward, compile_table
from flexgen.prepared_backward import INPUTS, Pass, PreparedBackward, gradient_form
from flexgen.problem import Guard, Problem, TableForm
from flexgen.runtime.bind import bind
from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.compile_ahead import AHEAD
from flexgen.runtime.derived_table import DerivedTable, Lists
from flexgen.runtime.describe import Launch, describe_guard, describe_problem, scalars_are_trusted
from flexgen.runtime.differentiable import Gradients, Saved
from flexgen.runtime.kernel import Kernel, divisible_positions
from flexgen.runtime.lists import column_lists, table_lists
from flexgen.runtime.packing import Packing
from flexgen.runtime.warm_backward import WarmBackward
from flexgen.tables import Tables, placeholder_lists

_log = logging.getLogger("flexgen")
MAX_FORMS = 64  # of backward calls kept for one form of forward call


@dataclass(slots=True)
class Launches:
    """The backward launches that were prepared for one form of forward call.

    Attributes:
        by_form: by the form of the backward call.
        last: the last one's, where it can be made with little host time.
    """

    by_form: dict[Hashable, PreparedBackward] = field(default_factory=dict)
    last: WarmBackward | None = None

    def clear(self) -> None:
        self.by_form.clear()
        self.last = None


@dataclass(frozen=True, slots=True)
class Basis:
    """What the backward of a form of call needs to know of its forward, besides tensors.

    Attributes:
        understood: the mods and what is known of them.
        problem: the forward's.
        target: the chip.
        table: the caller's block mask, if any, where its lists do not come with each call.
        scale: the softmax scale.
        scalars: names of the captured numbers.
        derived: the form of the table that the forward derived from the mask, or was given; then the backward kernels
            walk tables too.
        launches: what was prepared.
    """

    understood: Understood
    problem: Problem
    target: Target
    table: BlockTable | None
    scale: float
    scalars: tuple[str, ...]
    derived: TableForm | None = None
    launches: Launches = field(default_factory=Launches, compare=False)


@dataclass(frozen=True, slots=True)
class Called:
    """What one call brought, besides tensors that autograd saves.

    Attributes:
        scalars: captured numbers.
        given: a derived table.
        table: the lists of a block mask.
    """

    basis: Basis
    scalars: tuple[int | float, ...]
    given: DerivedTable | None = None
    table: BlockTable | None = None


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The loaded backward kernels of one configuration, in the order in which they run."""

    delta: Kernel
    passes: tuple[tuple[Kernel, AnyBackwardPlan], ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    """A backward call as it can be told from its forward: of tensors that have no memory."""

    launch: Launch
    outputs: Mapping[str, torch.Tensor]
    problem: Problem
    guard: Guard
    wanted: Wanted


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
        self._fitting = Fitting()
        self._lock = threading.Lock()

    def backward(
        self,
        called: Called,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        wanted: frozenset[str],
    ) -> Gradients:
        """Return the wanted gradients by name; see `Step.backward`."""
        launches = called.basis.launches
        if grad_output.stride(3) == 0:  # a sum's: the copy engine cannot repeat an entry
            grad_output = grad_output.contiguous()
        last = launches.last
        if last is not None and called.given is None:
            found = last.gradients(saved, grad_output, grad_logsumexp, wanted, called.scalars, called.table)
            if found is not None:
                return found
        form = _form(saved, grad_output, grad_logsumexp, wanted)
        prepared = launches.by_form.get(form)
        if prepared is None:
            prepared = self._prepare(called, saved, grad_output, grad_logsumexp, wanted)
            if len(launches.by_form) >= MAX_FORMS:
                launches.clear()
            launches.by_form[form] = prepared
        try:
            found = prepared.run(saved, grad_output, grad_logsumexp, called.scalars, called.given, called.table)
            if grad_logsumexp is None and called.given is None:
                launches.last = prepared.warmed(saved, grad_output)
            return found
        except OutOfResourcesError as error:
            launches.clear()
            self._take_less(prepared, error)
            try:
                return self.backward(called, saved, grad_output, grad_logsumexp, wanted)
            except (NoFeasiblePlanError, OptionError):
                raise nothing_smaller(error, self._options) from error

    def _take_less(self, prepared: PreparedBackward, error: OutOfResourcesError) -> None:
        """Plan kernels again for less, as one of them did not fit the device."""
        with self._lock:
            key = next((key for key, kept in self._kernels.items() if kept.delta is prepared.kernel), None)
            if key is not None:  # else another thread has been here
                kernels = self._kernels.pop(key)
                plans = [plan for kernel, plan in kernels.passes if kernel.entry == error.entry]
                if not plans:
                    raise error
                self._fitting.take_less(key, plans[0], error)

    @collector_paused()
    def _prepare(
        self,
        called: Called,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        wanted: frozenset[str],
    ) -> PreparedBackward:
        basis = called.basis
        names = [buffer.name for buffer in basis.understood.captured.mods.buffers]
        task = Wanted(
            inputs=wanted & frozenset(INPUTS),
            buffers=frozenset(name for index, name in enumerate(names) if f"buffer {index}" in wanted),
            from_logsumexp=grad_logsumexp is not None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        scalars = dict(zip(basis.scalars, called.scalars, strict=True))
        if called.table is not None:  # the form's lists, of which this call's stand for all
            basis = replace(basis, table=called.table)
        launch = _launch(basis, saved, grad_output, dict(zip(names, saved.buffers, strict=True)), scalars)
        gradients = gradient_form(launch, task)
        outputs = _placeholder_outputs(gradients.allocate(torch.device("meta")), task, grad_logsumexp)
        problem, guard = _described(basis, launch, outputs)
        kernels = self._compiled(basis, launch, problem, guard, task)
        if called.table is not None:  # of which passes need the forms alone
            launch = replace(launch, table={name: _without_memory(one) for name, one in launch.table.items()})
        passes = [self._pass(basis, launch, guard, *one) for one in kernels.passes]
        if basis.target.backend != "interpret":  # this process compiles the first meanwhile
            AHEAD.start([one.kernel.compile_job(replace(launch, table=one.lists), outputs) for one in passes[1:]])
        return PreparedBackward(
            *(kernels.delta, passes, launch, outputs, gradients, wanted, basis.table, self._tables),
            lists_change=called.table is not None,
        )

    def _pass(self, basis: Basis, launch: Launch, guard: Guard, kernel: Kernel, plan: AnyBackwardPlan) -> Pass:
        """Return one kernel with the block lists that it reads: the block mask's, or those of a derived table."""
        form, walked = _own_table(plan)
        if form is None:
            return Pass(kernel, plan, launch.table, None, None, takes_given=False)
        request = self._tables.request(basis.understood, launch, form, guard, basis.target, walked)
        lists = placeholder_lists(basis.understood, launch, form, walked)
        return Pass(kernel, plan, lists, request, form, takes_given=walked is Axis.KV)

    def compile_ahead(self, basis: Basis, forward: Launch, loss_reads_logsumexp: bool) -> None:
        """Begin to compile, in other processes, what the gradients of a call most likely take.

        What turns out to be something else is compiled when it is needed.
        """
        try:
            one = _expected(basis, forward, loss_reads_logsumexp)
            kernels = self._compiled(basis, one.launch, one.problem, one.guard, one.wanted)
        except FlexgenError as error:  # told if the gradients are wanted
            _log.debug("no backward is foreseen: %s", error)
            return
        delta, passes = kernels.delta.compile_job(one.launch, one.outputs), []
        for kernel, plan in kernels.passes:
            form, walked = _own_table(plan)
            lists = placeholder_lists(basis.understood, one.launch, form, walked) if form else one.launch.table
            passes.append(kernel.compile_job(replace(one.launch, table=lists), one.outputs))
        AHEAD.start([*passes, delta])  # those that take longest first

    def lower(self, basis: Basis, forward: Launch, loss_reads_logsumexp: bool) -> LoweredBackward:
        """Return the backward kernels of a call for every tensor that requires grad, without running any.

        Args:
            forward: the call's launch; of its tensors only shapes and strides matter.
        """
        one = _expected(basis, forward, loss_reads_logsumexp)
        trusted = scalars_are_trusted(one.launch.scalars)
        kernels = compile_backward(
            basis.understood, one.problem, one.guard, basis.target, self._options, trusted=trusted, wanted=one.wanted
        )
        tables = [_lower_table(basis, one.launch, one.guard, plan) for _, plan in kernels.passes]
        launches = [one.launch, *(replace(one.launch, table=lists) for _, lists in tables)]
        sources = (kernels.delta[0], *(source for source, _ in kernels.passes))
        divisible = tuple(
            divisible_positions(source.args, bind(source.args, launch, one.outputs))
            for source, launch in zip(sources, launches, strict=True)
        )
        return LoweredBackward(kernels, divisible, tuple(table for table, _ in tables))

    def _compiled(self, basis: Basis, launch: Launch, problem: Problem, guard: Guard, wanted: Wanted) -> _Kernels:
        captured = basis.understood.captured
        trusted = scalars_are_trusted(launch.scalars)
        key = (id(captured), problem, guard, basis.target.name, wanted, trusted)
        with self._lock:
            found = self._kernels.get(key)
            if found is None or found.delta.owner is not captured:
                target = self._fitting.target(key, basis.target)
                kernels = compile_backward(
                    basis.understood, problem, guard, target, self._options, trusted=trusted, wanted=wanted
                )
                found = self._kernels[key] = _load(kernels, captured)
        return found


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


def _expected(basis: Basis, forward: Launch, loss_reads_logsumexp: bool) -> _Expected:
    """Return the backward of a call for every tensor that requires grad."""
    saved = _placeholders(forward)
    wanted = Wanted(
        inputs=frozenset(name for name in INPUTS if forward.tensors[name].requires_grad),
        buffers=frozenset(name for name, buffer in forward.buffers.items() if buffer.requires_grad),
        from_logsumexp=loss_reads_logsumexp,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    buffers = dict(zip(forward.buffers, saved.buffers, strict=True))
    launch = _launch(basis, saved, _without_memory(saved.output), buffers, forward.scalars)
    made = gradient_form(launch, wanted).allocate(torch.device("meta"))
    outputs = _placeholder_outputs(made, wanted, saved.logsumexp if loss_reads_logsumexp else None)
    return _Expected(launch, outputs, *_described(basis, launch, outputs), wanted)


def _placeholders(launch: Launch) -> Saved:
    """Return what a forward would save, with the launch's strides and without memory."""
    query, key, value = (_without_memory(launch.tensors[name]) for name in ("query", "key", "value"))
    rows = query.shape[:3]
    output = query.new_empty((*rows, value.shape[3]))
    logsumexp = query.new_empty(rows, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    buffers = tuple(_without_memory(buffer) for buffer in launch.buffers.values())
    packing = Packing(*map(_without_memory, launch.cu_seqlens.values())) if launch.cu_seqlens else None
    return Saved(query, key, value, output, logsumexp, logsumexp, buffers, packing, launch.dropout)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _load(kernels: BackwardKernels, owner: object) -> _Kernels:
    passes = tuple((Kernel(source, plan, owner), plan) for source, plan in kernels.passes)
    return _Kernels(Kernel(*kernels.delta, owner), passes)


def _form(
    saved: Saved, grad_output: torch.Tensor, grad_logsumexp: torch.Tensor | None, wanted: frozenset[str]
) -> Hashable:
    """Return what decides everything about a backward call of one form of forward call, but addresses and values.

    The saved tensors are looked at again: hooks of autograd may return others than were saved.
    """
    tensors = [saved.query, saved.key, saved.value, saved.output, saved.logsumexp, grad_output, *saved.buffers]
    if saved.tail is not None:
        tensors.append(saved.tail)
    if grad_logsumexp is not None:
        tensors.append(grad_logsumexp)
    if saved.dropout is not None:
        tensors.append(saved.dropout.seed)
    if saved.packing is not None:
        tensors += saved.packing.tensors
    forms = [(t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() & 15) for t in tensors]
    return (wanted, grad_logsumexp is None, torch.are_deterministic_algorithms_enabled(), *forms)


def _placeholder_outputs(
    made: Mapping[str, torch.Tensor], wanted: Wanted, grad_logsumexp: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what the kernels may name beside the launch's tensors, of which only forms matter."""
    outputs = dict(made)
    if grad_logsumexp is not None:
        outputs["grad_logsumexp"] = grad_logsumexp
    if wanted.deterministic:
        outputs |= {f"scale of {name}": made[f"largest of {name}"] for name in wanted.buffers}
    return outputs


def _described(basis: Basis, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> tuple[Problem, Guard]:
    """Return what the plans may rely on: of the inputs and of their gradients."""
    grads = {name: outputs[name] for name in (f"grad_{name}" for name in sorted(INPUTS)) if name in outputs}
    tiles = {name: tensor for name, tensor in launch.tensors.items() if tensor.dim() == 4}
    described = replace(launch, tensors={**tiles, **grads})
    return _problem(basis, described), describe_guard(described, 0, basis.understood.facts.rows_safe)


def _launch(
    basis: Basis,
    saved: Saved,
    grad_output: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
    scalars: Mapping[str, int | float],
) -> Launch:
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
        scalars=scalars,
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
