"""The plan of a plain Triton backward kernel: every template variable, each with its decision."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from flexgen.lowering.decision import Decision
from flexgen.lowering.dropout import Draws
from flexgen.lowering.index_map import IndexMap
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.targets import Target


class BackwardKernel(enum.Enum):
    """The side that a kernel's programs own; the value is the entry's name of a kernel in plain Triton."""

    DQ = "backward_dq"  # a tile of queries walks keys
    DKDV = "backward_dkdv"  # a tile of keys walks queries


class Accumulation(enum.Enum):
    """How the programs of a kernel add up the gradients of captured buffers."""

    FLOAT = "float"  # atomic additions, whose order varies from run to run
    MEASURE = "measure"  # nothing is added: finds the largest magnitude that would be, for FIXED
    FIXED = "fixed"  # atomic additions of 64-bit integers, which give the same sum in any order


@dataclass(frozen=True, slots=True)
class ScatterSite:
    """One of the places where a score_mod reads a captured buffer, whose gradient a kernel accumulates.

    Attributes:
        buffer: the buffer's name.
        place: which of the buffer's scatters, counted in the order of the `ScoreGrad`.
    """

    buffer: str
    place: int


@dataclass(frozen=True, slots=True)
class BackwardTask:
    """What one kernel computes.

    Attributes:
        kernel: the side that its programs own.
        writes: which of "query", "key" and "value" get their gradient from it.
        scatter: the places whose gradient it accumulates.
        because: why they are accumulated here.
        kept_tiles: tiles of scores that mods keep alive, for the choice of the kernel's tile.
        accumulation: how.
    """

    kernel: BackwardKernel
    writes: frozenset[str]
    scatter: tuple[ScatterSite, ...]
    because: str
    kept_tiles: int = 0
    accumulation: Accumulation = Accumulation.FLOAT


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Template variables of a backward kernel, by Inductor's names.

    Attributes:
        kernel: the side that its programs own.
        WRITE_GRAD_QUERY, WRITE_GRAD_KEY, WRITE_GRAD_VALUE: which gradients it writes, if wanted.
        BLOCK_M, BLOCK_N: queries and keys of a tile (BLOCK_M1, BLOCK_N1 for dK/dV; BLOCK_M2, BLOCK_N2 for dQ).
        scatter, accumulation: gradients of captured buffers that it accumulates, and how.
        Others as in ForwardPlan.
    """

    kernel: BackwardKernel
    target: Target
    WRITE_GRAD_QUERY: bool
    WRITE_GRAD_KEY: bool
    WRITE_GRAD_VALUE: bool
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    QK_HEAD_DIM: int
    QK_HEAD_DIM_ROUNDED: int
    V_HEAD_DIM: int
    V_HEAD_DIM_ROUNDED: int
    SAFE_HEAD_DIM: bool
    IS_DIVISIBLE: bool
    SM_SCALE: float | None
    GQA_SHARED_HEADS: int
    HAS_FULL_BLOCKS: bool
    SPARSE_Q_BLOCK_SIZE: int
    SPARSE_KV_BLOCK_SIZE: int
    FLOAT32_PRECISION: str
    FAST_TANH: bool
    LONG_ROWS_FIRST: bool
    DROPOUT: Draws
    FOLD_SCALE: bool
    SUBTRACT_FIRST: bool
    kpack: int | None
    matrix_instr_nonkdim: int | None
    waves_per_eu: int | None
    shared_bytes: int
    SEARCH_WIDTH: int
    index_map: IndexMap
    schedule: Schedule
    scatter: tuple[ScatterSite, ...]
    accumulation: Accumulation
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    accumulator_dtype: torch.dtype
    unit_stride: frozenset[str]
    wide: frozenset[str]
    wide_index: bool
    decisions: tuple[Decision, ...]

    @property
    def differentiates_scores(self) -> bool:
        """Whether the kernel needs the gradient of each score; the gradient of values needs their weights alone."""
        return self.WRITE_GRAD_QUERY or self.WRITE_GRAD_KEY or bool(self.scatter)

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        amd = {name: getattr(self, name) for name in ("kpack", "matrix_instr_nonkdim", "waves_per_eu")}
        given = {name: value for name, value in amd.items() if value is not None}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **given}


@dataclass(frozen=True, slots=True)
class RowForm:
    """How the values of rows are written for the kernels that read them.

    Attributes:
        BASE_2: `row_shift` is multiplied by log2(e).
        ROW_MULTIPLE: each head's rows begin at a multiple of it, and those after the last query are filled with what
            gives weights and gradients of 0; 1 for rows without gaps.
        writes_tail: the logsumexp's tail is written too, as `row_tail`, so that it is in the same places.
    """

    BASE_2: bool = False
    ROW_MULTIPLE: int = 1
    writes_tail: bool = False


PLAIN_ROWS = RowForm()
MOST_ROW_MULTIPLE = 128  # there is room for this one


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """The plan of the kernel that prepares rows for the others.

    Attributes:
        BLOCK_M: rows of a program.
        V_HEAD_DIM, V_HEAD_DIM_ROUNDED: last dimension of output and its gradient.
        has_grad_logsumexp: the loss depends on the logsumexp.
        rows: how it writes what it prepares.
        dtype: of output and its gradient.
    """

    target: Target
    BLOCK_M: int
    V_HEAD_DIM: int
    V_HEAD_DIM_ROUNDED: int
    num_warps: int
    has_grad_logsumexp: bool
    rows: RowForm
    dtype: torch.dtype
    accumulator_dtype: torch.dtype
    unit_stride: frozenset[str]
    wide: frozenset[str]

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        return {"num_warps": self.num_warps, "num_stages": 1}
