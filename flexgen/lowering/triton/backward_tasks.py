"""Divides the wanted gradients between the backward kernels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from flexgen.ir.graph import Axis
from flexgen.ir.score_grad import ScoreGrad
from flexgen.lowering.triton.backward_plan import Accumulation, BackwardKernel, BackwardTask, ScatterSite


def backward_tasks(
    grad: ScoreGrad | None, wanted: frozenset[str], write_dq: bool | None, *, deterministic: bool
) -> tuple[BackwardTask, ...]:
    """Return what to launch, in order; nothing for a gradient that is zero whatever the tensors are.

    Args:
        grad: gradients of the score_mod, of the wanted buffers only; None without a score_mod.
        wanted: "query", "key" and "value" as far as their gradients are wanted; other names are ignored.
        write_dq: the option WRITE_DQ.
        deterministic: gradients of buffers must not depend on the order of additions.
    """
    writes = _writes(grad, wanted)
    free, because = _home(writes, write_dq)
    sites: dict[BackwardKernel, list[ScatterSite]] = {kernel: [] for kernel in BackwardKernel}
    for axes, site in _sites(grad):
        sites[_kernel_of(axes, free)].append(site)
    pairs = {site for axes, site in _sites(grad) if {Axis.Q, Axis.KV} <= axes}
    tasks = tuple(
        BackwardTask(
            kernel=kernel,
            writes=writes[kernel],
            scatter=tuple(sites[kernel]),
            because=because if sites[kernel] else "nothing wanted here",
            kept_tiles=_kept_tiles(grad, pairs.intersection(sites[kernel])),
        )
        for kernel in BackwardKernel
        if writes[kernel] or sites[kernel]
    )
    return tuple(_deterministic(tasks)) if deterministic else tasks


def _kept_tiles(grad: ScoreGrad | None, pairs: frozenset[ScatterSite] | set[ScatterSite]) -> int:
    """Return how many tiles of values are kept besides weights: scores that derivatives read; addresses to add at.

    Fitted to where kernels compiled offline begin to spill: a score takes what it is recomputed from along.
    """
    return 3 * (grad is not None and grad.needs_score) + 3 * len(pairs)


def _writes(grad: ScoreGrad | None, wanted: frozenset[str]) -> dict[BackwardKernel, frozenset[str]]:
    """Return which gradients each kernel writes; where none reaches the score, those of query and key are zero."""
    reached = wanted & {"value"} if grad is not None and grad.is_zero else wanted
    return {BackwardKernel.DQ: reached & {"query"}, BackwardKernel.DKDV: reached & {"key", "value"}}


def _home(writes: dict[BackwardKernel, frozenset[str]], write_dq: bool | None) -> tuple[BackwardKernel, str]:
    """Return the kernel of gradients that either could accumulate, and why."""
    if write_dq is not None:
        return (BackwardKernel.DQ if write_dq else BackwardKernel.DKDV), f"WRITE_DQ={bool(write_dq)} was asked for"
    if writes[BackwardKernel.DKDV] and not writes[BackwardKernel.DQ]:
        return BackwardKernel.DKDV, "this kernel is needed anyway, the one of dQ is not"
    return BackwardKernel.DQ, "sums over keys, or over queries, before it writes where the element allows it"


def _kernel_of(axes: frozenset[Axis], free: BackwardKernel) -> BackwardKernel:
    """Return the kernel of an element that depends on these axes: of one side alone, the kernel that owns the side."""
    match (Axis.Q in axes, Axis.KV in axes):
        case (True, False):
            return BackwardKernel.DQ
        case (False, True):
            return BackwardKernel.DKDV
    return free


def _sites(grad: ScoreGrad | None) -> Iterator[tuple[frozenset[Axis], ScatterSite]]:
    places: Counter[str] = Counter()
    for scatter in grad.scatters if grad else ():
        yield scatter.axes, ScatterSite(scatter.buffer, places[scatter.buffer])
        places[scatter.buffer] += 1


def _deterministic(tasks: tuple[BackwardTask, ...]) -> Iterator[BackwardTask]:
    """Measure every scatter before the first one is accumulated: places of one buffer share a scale."""
    for task in tasks:
        if task.scatter:
            yield dataclasses.replace(task, writes=frozenset(), accumulation=Accumulation.MEASURE)
    for task in tasks:
        yield dataclasses.replace(task, accumulation=Accumulation.FIXED) if task.scatter else task
