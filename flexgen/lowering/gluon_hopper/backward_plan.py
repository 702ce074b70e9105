"""The plan of a Gluon backward kernel for Hopper: every template variable, each with its decision."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from flexgen.lowering.decision import Decision
from flexgen.lowering.intervals import Interval
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import (
    MOST_ROW_MULTIPLE,
    Accumulation,
    BackwardKernel,
    RowForm,
    ScatterSite,
)


class Sums(enum.Enum):
    """What a kernel adds up in registers; the value is its entry's name."""

    QUERY = "backward_dq"
    KEY_AND_VALUE = "backward_dkdv"
    KEY = "backward_dk"
    VALUE = "backward_dv"

    @staticmethod
    def of(writes: frozenset[str]) -> Sums:
        """Return the sums of the wanted gradients that one kernel writes: "query", or "key" and "value"."""
        found = {frozenset({"query"}): Sums.QUERY, frozenset({"key"}): Sums.KEY, frozenset({"value"}): Sums.VALUE}
        return found.get(writes, Sums.KEY_AND_VALUE)


# A multiple of every tile, so that a tile reads no other head's rows; the copy engine reads from 16 bytes on.
ROW_MULTIPLE = MOST_ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class GluonBackwardPlan:
    """Template variables of a Hopper backward kernel, and what surrounds them.

    A program owns a tile of keys (dK, dV) or of queries (dQ), of which each consumer warpgroup has WARPGROUP_ROWS, and
    walks tiles of the other side. Names that other plans have too mean the same; these are Hopper's own:

    Attributes:
        sums: which gradients it adds up.
        CONSUMERS: warpgroups that compute.
        num_stages: tiles of queries (dK, dV) or of keys (dQ) in shared memory.
        PARTNER_STAGES: tiles of output gradients (dK, dV) or of values (dQ) in shared memory.
        PIPELINED: a step's products run beside those that add the tile before it; this keeps two tiles in registers.
        FRESH_ADDRESSES: where tiles lie is computed at each step; the compiler would keep it in registers.
        WALKED_TAIL: the last tile walked may reach past the side's length.
        CONSUMER_REGISTERS, PRODUCER_REGISTERS: registers of a thread after the partitions have shared them out.
        maxnreg: registers of a thread at launch.
        live: where what an own row sees is exactly one interval of the walked side, that interval: the mask is then
            one unsigned compare, which also bounds the walked side by its length; else None, and mask_mod is evaluated.
        shared_bytes: an upper bound.
        spelling: as of the forward plan.
    """

    kernel: BackwardKernel
    sums: Sums
    target: Target
    WRITE_GRAD_QUERY: bool
    WRITE_GRAD_KEY: bool
    WRITE_GRAD_VALUE: bool
    BLOCK_M: int
    BLOCK_N: int
    CONSUMERS: int
    num_warps: int
    num_stages: int
    PARTNER_STAGES: int
    PIPELINED: bool
    FRESH_ADDRESSES: bool
    WALKED_TAIL: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    maxnreg: int
    QK_HEAD_DIM: int
    QK_HEAD_DIM_ROUNDED: int
    V_HEAD_DIM: int
    V_HEAD_DIM_ROUNDED: int
    SAFE_HEAD_DIM: bool
    SM_SCALE: float | None
    GQA_SHARED_HEADS: int
    HAS_FULL_BLOCKS: bool
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    FAST_TANH: bool
    LONG_ROWS_FIRST: bool
    FOLD_SCALE: bool
    SUBTRACT_FIRST: bool
    shared_bytes: int
    spelling: str
    live: Interval | None
    schedule: Schedule
    query_dtype: torch.dtype
    wide: frozenset[str]
    decisions: tuple[Decision, ...]
    scatter: tuple[ScatterSite, ...] = ()
    accumulation: Accumulation = Accumulation.FLOAT

    @property
    def differentiates_scores(self) -> bool:
        """Whether the kernel needs the gradient of each score; the gradient of values needs their weights alone."""
        return self.sums is not Sums.VALUE

    @property
    def rows(self) -> RowForm:
        """How the kernel reads the values of rows."""
        return RowForm(not self.SUBTRACT_FIRST, ROW_MULTIPLE, self.SUBTRACT_FIRST)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
