"""The plan of a Gluon forward kernel for Hopper: every template variable, each with its decision."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from flexgen.lowering.decision import Decision
from flexgen.lowering.index_map import IndexMap
from flexgen.lowering.intervals import Interval
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.score_fold import ScoreFold
from flexgen.lowering.targets import Target

WARPGROUP_ROWS = 64  # rows of scores that one warpgroup's matrix instruction computes
PROGRAM_WARPS = 4  # warps of one warpgroup; Gluon adds those of the other partitions itself


ONE_HEAD = IndexMap()  # rows of a tile are consecutive queries of one head


class Template(enum.Enum):
    """How the warps of a program share the work."""

    WARP_SPECIALISED = "WS"  # a producer warp and two or three consumer warpgroups
    ONE_WARPGROUP = "ONE"  # one warpgroup that issues its own copies; several programs share a multiprocessor

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class GluonPlan:
    """Template variables of the Hopper forward kernels, and what surrounds them.

    Names that plain Triton's plan has too mean the same; these are Hopper's own:

    Attributes:
        template: see Template.
        CONSUMERS: warpgroups that compute; each owns WARPGROUP_ROWS of the tile's BLOCK_M rows.
        num_stages: key tiles and value tiles in shared memory (of a one-warpgroup kernel: key tiles).
        VALUE_STAGES: value tiles in shared memory.
        PERSISTENT: as many programs as multiprocessors run, and each walks over tiles.
        KV_TAIL: the last key tile may reach past KV_LEN.
        CONSUMER_REGISTERS, PRODUCER_REGISTERS: registers of a thread after the partitions have shared them out.
        maxnreg: registers of a thread at launch.
        score: score_mod without its constant factors, and these; None for no score_mod.
        live_keys: where a row's live keys are exactly one interval, that interval: the mask is then one unsigned
            compare, which also bounds the keys by KV_LEN; else None, and mask_mod is evaluated.
        shared_bytes: an upper bound.
        spelling: which of Gluon's spellings the kernel is written in; releases of Triton differ.
    """

    target: Target
    template: Template
    BLOCK_M: int
    BLOCK_N: int
    CONSUMERS: int
    num_warps: int
    num_stages: int
    VALUE_STAGES: int
    PERSISTENT: bool
    LONG_ROWS_FIRST: bool
    KV_TAIL: bool
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    HAS_FULL_BLOCKS: bool
    BLOCKS_ARE_CONTIGUOUS: bool
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
    ROWS_GUARANTEED_SAFE: bool
    OUTPUT_LOGSUMEXP: bool
    OUTPUT_MAX: bool
    OUTPUT_TAIL: bool
    FLOAT32_PRECISION: str
    FAST_TANH: bool
    FOLD_SCALE: bool
    SUBTRACT_FIRST: bool
    shared_bytes: int
    spelling: str
    score: ScoreFold | None
    live_keys: Interval | None
    schedule: Schedule
    query_dtype: torch.dtype
    wide: frozenset[str]
    decisions: tuple[Decision, ...]
    PRESCALE_QK: bool = False
    USE_TMA: bool = True
    USE_SUBTILING: bool = False
    index_map: IndexMap = ONE_HEAD

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}

    def programs(self, tiles: int, processors: int) -> int:
        """Return how many programs to launch for `tiles` row tiles of all heads."""
        return min(tiles, processors) if self.PERSISTENT else tiles
