"""What a stand-alone module is made from: the kernels of one configuration, with their plans."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.codegen.block_table_emit import TableSource
from flexgen.codegen.source import KernelSource
from flexgen.ir.graph import Mods, Node
from flexgen.lowering.dropout import Draws
from flexgen.lowering.plans import AnyBackwardPlan, AnyForwardPlan, WalkPlan
from flexgen.lowering.table_plan import TablePlan
from flexgen.lowering.triton.backward_plan import DeltaPlan
from flexgen.lowering.triton.plan import ForwardPlan


@dataclass(frozen=True, slots=True)
class Table:
    """The kernels that derive a block table, and their plan."""

    source: TableSource
    plan: TablePlan


@dataclass(frozen=True, slots=True)
class Pass:
    """A backward kernel, and the kernels of the table it walks, if it does."""

    source: KernelSource
    plan: AnyBackwardPlan
    table: Table | None

    @property
    def name(self) -> str:
        """What tells the names of its module from those of others: "dq", "dkdv", "dk" or "dv"."""
        return self.source.entry.removeprefix("backward_")


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward kernels.

    Attributes:
        delta, passes: in the order in which they run.
        inputs, buffers: which gradients they compute: of query, key and value, and of captured tensors by name.
    """

    delta: tuple[KernelSource, DeltaPlan]
    passes: tuple[Pass, ...]
    inputs: frozenset[str]
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Exported:
    """What a stand-alone module is made from.

    Attributes:
        how: the command or call that makes it, for the header.
        layout: "bhsd" or "bshd", of query, key, value and output.
        mods: simplified.
        forward, plan: the forward kernel.
        table: the kernels of the table that it walks, if it does.
        backward: None for the forward alone.
        assumptions: what the plans' proofs ask of lengths and captured numbers.
        returns_logsumexp: `attention` returns it beside the output.
        packed: its kernels are machine code beside it, and not in its text.
    """

    how: str
    version: str
    layout: str
    mods: Mods
    forward: KernelSource
    plan: AnyForwardPlan
    table: Table | None
    backward: Backward | None
    assumptions: tuple[Node, ...]
    returns_logsumexp: bool
    packed: bool = False

    @property
    def plans(self) -> tuple[WalkPlan, ...]:
        """The plans of the kernels that walk tiles."""
        return (self.plan, *(one.plan for one in (self.backward.passes if self.backward else ())))

    @property
    def packs_sequences(self) -> bool:
        """Whether sequences are packed along the length, and `attention` takes where each begins."""
        return self.plan.index_map.packs_sequences

    @property
    def sides(self) -> tuple[str, ...]:
        """What `attention` takes besides query, key, value and captured values: "kv_lengths", "page_table", scales."""
        plan = self.plan
        if not isinstance(plan, ForwardPlan):
            return ()
        pages, value_scale = plan.index_map.page_size > 0, plan.V_SCALE != ""
        given = {"kv_lengths": plan.lengths_dtype is not None, "page_table": pages, "k_scale": plan.K_SCALE}
        return tuple(name for name, is_given in (*given.items(), ("v_scale", value_scale)) if is_given)

    @property
    def drops(self) -> bool:
        """Whether softmax weights are dropped, and `attention` takes the probability."""
        return isinstance(self.plan, ForwardPlan) and self.plan.DROPOUT is not Draws.NONE
