"""Stand-alone modules: what a lowered configuration becomes when it leaves flexgen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flexgen import __version__
from flexgen.aux_outputs import AuxRequest
from flexgen.codegen.export.exported import Backward, Exported, Pass, Table
from flexgen.codegen.export.module import emit_module
from flexgen.errors import OptionError, UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.plans import RowPlan, WalkPlan
from flexgen.options import Layout, Options
from flexgen.pipeline import TableKernel


def lower_plain(options: Options, lower: Callable[[Options], Lowered]) -> Lowered:
    """Return a lowering for a package of machine code: of Triton's kernels where the options leave the backend open.

    Args:
        lower: lowers with the options it is given.

    Raises:
        OptionError: they ask for Hopper's.
    """
    if "GLUON" in (options.forward().BACKEND, options.backward().BACKEND):
        raise OptionError(
            "BACKEND='GLUON' cannot be packed as machine code",
            why="its launch needs the copy engine's descriptors, which the package's loader does not make",
            fix="leave BACKEND out or set it to TRITON, or export without --binary",
        )
    lowered = lower(options)
    passes = lowered.backward.passes.values() if lowered.backward else ()
    if _is_hopper(lowered.plan):
        options = dataclasses.replace(options, fwd=dataclasses.replace(options.fwd, BACKEND="TRITON"))
    if any(_is_hopper(plan) for _, plan in passes):
        options = dataclasses.replace(options, bwd=dataclasses.replace(options.bwd, BACKEND="TRITON"))
    return lower(options)


def _is_hopper(plan: WalkPlan | RowPlan) -> bool:
    return isinstance(plan, GluonPlan | GluonBackwardPlan)


def export_module(lowered: Lowered, *, layout: Layout, aux: AuxRequest, how: str) -> str:
    """Return the text of a Python module that computes a configuration and imports torch and triton alone.

    Args:
        lowered: any configuration without a block mask.
        layout: of query, key, value and output.
        aux: what it was lowered for: with `lse`, its `attention` returns the logsumexp too.
        how: the command or call that makes it, for its header.

    Raises:
        UnsupportedProblemError: the kernels need what a stand-alone module does not have; says what to change.
    """
    return emit_module(exported(lowered, layout=layout, aux=aux, how=how))


def exported(lowered: Lowered, *, layout: Layout, aux: AuxRequest, how: str) -> Exported:
    """Return what a stand-alone module is made from; arguments and errors as for `export_module`."""
    plan = lowered.plan
    if aux.max_scores:
        raise UnsupportedProblemError(
            "the maxima of scores cannot be exported",
            why="a stand-alone module returns the output and the logsumexp",
            fix="leave max_scores out",
        )
    proof = lowered.understood.facts.rows_safe
    return Exported(
        how=how,
        version=__version__,
        layout=layout,
        mods=lowered.understood.mods,
        forward=lowered.forward.source,
        plan=plan,
        table=_table(lowered.table),
        backward=_backward(lowered),
        assumptions=proof.assumptions if plan.ROWS_GUARANTEED_SAFE else (),
        returns_logsumexp=aux.lse,
    )


def _table(kernel: TableKernel | None) -> Table | None:
    return Table(kernel.source, kernel.plan) if kernel else None


def _backward(lowered: Lowered) -> Backward | None:
    if lowered.backward is None:
        return None
    kernels = lowered.backward.kernels
    pairs = zip(kernels.passes, lowered.backward.tables, strict=True)
    return Backward(
        kernels.delta,
        tuple(Pass(source, plan, _table(table)) for (source, plan), table in pairs),
        kernels.wanted.inputs,
        kernels.wanted.buffers,
    )
