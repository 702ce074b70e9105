"""Backward of an attention: which kernels a call's gradients need, compiled once for each configuration."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.options import KernelOptions
from flexgen.pipeline import BackwardSources, Understood, compile_backward
from flexgen.problem import Problem
from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.describe import Launch, describe_guard, describe_problem, scalars_are_trusted
from flexgen.runtime.differentiable import Gradients, Saved
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.lists import column_lists, table_lists


@dataclass(frozen=True, slots=True)
class Basis:
    """What the backward of a call needs to know of its forward, besides tensors.

    Attributes:
        understood: the mods and what is known of them.
        problem: the forward's.
        target: the chip.
        table: the caller's block mask, if any.
        scale, scalars: run-time numbers of the call.
    """

    understood: Understood
    problem: Problem
    target: Target
    table: BlockTable | None
    scale: float
    scalars: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The loaded backward kernels of one configuration."""

    delta: Kernel
    grads: Mapping[BackwardKernel, Kernel]


class Training:
    """The backward kernels of one Attention.

    Args:
        options: the backward options.
    """

    def __init__(self, options: KernelOptions) -> None:
        self._options = options
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
        scatter = tuple(name for index, name in enumerate(names) if f"buffer {index}" in wanted)
        launch = _launch(basis, saved, grad_output, buffers)
        outputs = _allocate(launch, scatter)
        if grad_logsumexp is not None:
            outputs["grad_logsumexp"] = grad_logsumexp
        kernels = self._compiled(basis, launch, outputs, wanted, scatter)
        for kernel in (kernels.delta, *kernels.grads.values()):
            kernel.run(launch, outputs)
        return _collect(wanted, names, buffers, outputs)

    def _compiled(
        self,
        basis: Basis,
        launch: Launch,
        outputs: Mapping[str, torch.Tensor],
        wanted: frozenset[str],
        scatter: tuple[str, ...],
    ) -> _Kernels:
        has_grad_logsumexp = "grad_logsumexp" in outputs
        tiles = {name: tensor for name, tensor in {**launch.tensors, **outputs}.items() if tensor.dim() == 4}
        described = replace(launch, tensors={n: t for n, t in tiles.items() if not n.startswith("grad of ")})
        problem = _problem(basis, described)
        guard = describe_guard(described, 0, basis.understood.facts.rows_safe)
        captured = basis.understood.captured
        trusted = scalars_are_trusted(launch.scalars)
        key = (id(captured), problem, guard, basis.target.name, wanted, scatter, has_grad_logsumexp, trusted)
        with self._lock:
            found = self._kernels.get(key)
            if found is None or found.delta.owner is not captured:
                sources = compile_backward(
                    basis.understood,
                    problem,
                    guard,
                    basis.target,
                    self._options,
                    trusted=trusted,
                    wanted=wanted,
                    scatter=scatter,
                    has_grad_logsumexp=has_grad_logsumexp,
                )
                found = self._kernels[key] = _load(sources, captured)
        return found


def _load(sources: BackwardSources, owner: object) -> _Kernels:
    grads = {kernel: Kernel(source, plan, owner) for kernel, (source, plan) in sources.grads.items()}
    return _Kernels(Kernel(sources.delta[0], sources.delta[1], owner), grads)


def _launch(basis: Basis, saved: Saved, grad_output: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> Launch:
    batch, q_heads, q_len, _ = saved.query.shape
    tensors = {"query": saved.query, "key": saved.key, "value": saved.value, "grad_output": grad_output}
    table = {**table_lists(basis.table), **column_lists(basis.table)} if basis.table else {}
    return Launch(
        batch=batch,
        q_heads=q_heads,
        kv_heads=saved.key.shape[1],
        q_len=q_len,
        kv_len=saved.key.shape[2],
        tensors={**tensors, "output": saved.output, "logsumexp": saved.logsumexp},
        scale=basis.scale,
        table=table,
        buffers=buffers,
        scalars=basis.scalars,
    )


def _problem(basis: Basis, launch: Launch) -> Problem:
    return describe_problem(
        launch,
        constant_scale=basis.problem.scale is not None,
        table=basis.table.form if basis.table else None,
        output_logsumexp=False,
        output_max=False,
        has_offsets=False,
    )


def _allocate(launch: Launch, scatter: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Allocate gradients: of tensors uninitialised, in their own order of heads and rows; of buffers zeroed."""
    query = launch.tensors["query"]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (launch.batch, launch.q_heads, launch.q_len)
    outputs = {name: query.new_empty(rows, dtype=dtype) for name in ("delta", "row_shift")}
    for name in ("query", "key", "value"):
        outputs[f"grad_{name}"] = _like(launch.tensors[name])
    for name in scatter:
        buffer = launch.buffers[name]
        outputs[f"grad of {name}"] = torch.zeros(buffer.shape, dtype=dtype, device=buffer.device)
    return outputs


def _like(tensor: torch.Tensor) -> torch.Tensor:
    b, h, s, d = tensor.shape
    if h > 1 and s > 1 and tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((b, s, h, d)).transpose(1, 2)
    return tensor.new_empty((b, h, s, d))


def _collect(
    wanted: frozenset[str], names: list[str], buffers: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> Gradients:
    found: Gradients = {name: outputs[f"grad_{name}"] for name in ("query", "key", "value") if name in wanted}
    for index, name in enumerate(names):
        if f"buffer {index}" in wanted:
            found[f"buffer {index}"] = outputs[f"grad of {name}"].to(buffers[name].dtype)
    return found
