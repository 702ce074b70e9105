"""Stand-alone modules: what a lowered configuration becomes when it leaves flexgen."""

from __future__ import annotations

from flexgen import __version__
from flexgen.aux_outputs import AuxRequest
from flexgen.codegen.export.exported import Backward, Exported, Pass, Table
from flexgen.codegen.export.module import emit_module
from flexgen.errors import UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.options import Layout
from flexgen.pipeline import TableKernel


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
