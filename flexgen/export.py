"""Stand-alone modules: what a lowered configuration becomes when it leaves flexgen."""

from __future__ import annotations

from flexgen import __version__
from flexgen.codegen.export.module import Backward, Exported, Pass, Table, emit_module
from flexgen.errors import UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.options import Layout
from flexgen.pipeline import TableKernel


def export_module(lowered: Lowered, *, layout: Layout, returns_logsumexp: bool, how: str) -> str:
    """Return the text of a Python module that computes a configuration and imports torch and triton alone.

    Args:
        lowered: for plain Triton kernels.
        layout: of query, key, value and output.
        returns_logsumexp: whether its `attention` returns the logsumexp of each row too; it was lowered with it.
        how: the command or call that makes it, for its header.

    Raises:
        UnsupportedProblemError: the kernels need what a stand-alone module does not have; says what to change.
    """
    plan = lowered.plan
    if type(plan) is not ForwardPlan:
        raise UnsupportedProblemError(
            f"a {type(plan).__name__.removesuffix('Plan')} kernel cannot be exported",
            why="its launch needs descriptors and device facts that plain Triton launches do not have",
            fix="export with BACKEND=TRITON",
        )
    proof = lowered.understood.facts.rows_safe
    return emit_module(
        Exported(
            how=how,
            version=__version__,
            layout=layout,
            mods=lowered.understood.mods,
            forward=lowered.forward.source,
            plan=plan,
            table=_table(lowered.table),
            backward=_backward(lowered),
            assumptions=proof.assumptions if plan.ROWS_GUARANTEED_SAFE else (),
            returns_logsumexp=returns_logsumexp,
        )
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
