"""The plan of the kernels that derive a block table from a mask."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.ir.graph import Axis
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.targets import Target
from flexgen.problem import TableForm

COLUMNS = 1024  # blocks classified at a time; guess: eight for each thread of a program, so that loads overlap


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What the kernels of one table depend on.

    Attributes:
        rule: when a block is empty, and when it is full.
        q_block_size, kv_block_size: the sides of a block, powers of two.
        walked: the axis whose blocks are listed: KV lists blocks of keys for each block of queries.
        exact: also evaluate the mask in the blocks that the rule does not decide.
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
    def form(self) -> TableForm:
        return TableForm(self.q_block_size, self.kv_block_size, True, derived=True)
