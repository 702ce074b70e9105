"""The plan of the kernels that derive a block table from a mask."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.ir.graph import Axis
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.targets import Target
from flexgen.problem import TableForm

MAX_BLOCK_PAIRS = 1 << 15  # of a block that one program evaluates; more do not fit its registers
COLUMNS = 1024  # blocks classified at a time; guess: eight for each thread of a program, so that loads overlap


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What the kernels of one table depend on.

    Attributes:
        rule: when a block is empty, and when it is full.
        q_block_size, kv_block_size: the sides of a block, powers of two.
        walked: the axis whose blocks are listed: KV lists blocks of keys for each block of queries.
        exact: also tell the state of each block, evaluating the mask where the rule does not decide.
        columns: walked blocks that a program classifies at a time, a power of two.
        wide, wide_index: see Guard.
    """

    target: Target
    rule: BlockRule
    q_block_size: int
    kv_block_size: int
    walked: Axis
    wide: frozenset[str]
    wide_index: bool
    exact: bool = False
    columns: int = COLUMNS
    num_warps: int = 4

    @property
    def drops_empty(self) -> bool:
        return drops_empty(self.rule, self.form) and not self.exact

    @property
    def axes(self) -> frozenset[Axis]:
        return self.rule.mask_axes if self.exact else table_axes(self.rule, self.form)

    @property
    def form(self) -> TableForm:
        return TableForm(self.q_block_size, self.kv_block_size, True, derived=True)


def drops_empty(rule: BlockRule, form: TableForm) -> bool:
    """Whether the mask is evaluated in the listed blocks that need it, to leave out those without a live pair.

    It is where the rule does not classify all of the mask. That costs a fraction of one attention, whose kernel
    evaluates the mask in the same blocks for each head.
    """
    return bool(rule.unsolved) and form.q_block_size * form.kv_block_size <= MAX_BLOCK_PAIRS


def table_axes(rule: BlockRule, form: TableForm) -> frozenset[Axis]:
    """Return which of B and H a derived table depends on."""
    return rule.mask_axes if drops_empty(rule, form) else rule.axes
