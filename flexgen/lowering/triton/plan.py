"""The plan of a plain Triton forward kernel: every template variable, each with its decision."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.lowering.decision import Decision
from flexgen.lowering.dropout import Draws
from flexgen.lowering.index_map import IndexMap
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.targets import Target


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Template variables of the forward kernel, by Inductor's names, and what surrounds them.

    Attributes:
        BLOCK_M, BLOCK_N: rows and keys of a tile.
        QK_HEAD_DIM, V_HEAD_DIM: head dims; the `_ROUNDED` ones are the tile's, powers of two, at least 16.
        SAFE_HEAD_DIM: both head dims equal their rounded form, so that no load masks the head dim.
        IS_DIVISIBLE: both lengths are multiples of the tile, so that no load masks rows or keys.
        SM_SCALE: the softmax scale; None when it is the run-time argument sm_scale.
        GQA_SHARED_HEADS: query heads for each key/value head.
        HAS_FULL_BLOCKS: the block table lists full blocks apart.
        SPARSE_Q_BLOCK_SIZE, SPARSE_KV_BLOCK_SIZE: the block table's block sizes; 0 without a table.
        PRESCALE_QK: the query is scaled once instead of each score.
        ROWS_GUARANTEED_SAFE: every row is proved to have a live key.
        BLOCKS_ARE_CONTIGUOUS: a row's listed blocks are consecutive: only the first index is read.
        USE_TMA: key and value tiles come through the bulk copy engine.
        USE_SUBTILING: the accumulator is rescaled in two halves of its columns.
        OUTPUT_LOGSUMEXP, OUTPUT_MAX: auxiliary outputs.
        OUTPUT_TAIL: what rounding takes from the logsumexp is written too, for the backward.
        FLOAT32_PRECISION: input precision of float32 matrix products.
        FAST_TANH: tanh in score_mod by the hardware approximation.
        LONG_ROWS_FIRST: programs of the last queries start first.
        DROPOUT: how the kernel draws which softmax weights it drops, if any.
        FOLD_SCALE: scale and log2(e) are one multiplier inside the exponential (identity score_mod).
        SUBTRACT_FIRST: the row maximum is subtracted before scaling by log2(e), so that scores of any magnitude
            keep their differences.
        SEARCH_WIDTH: sequences that a tile compares at a time in the search for its own, where they are packed;
            else 0.
        query_dtype, key_dtype, value_dtype: element dtypes; the output has the query's.
        accumulator_dtype: dtype of scores, sums and auxiliary outputs.
        unit_stride: tensors whose last dimension has stride 1.
        wide, wide_index: see Guard.
        lengths_dtype: see Problem.
        K_SCALE, V_SCALE: k_scale and v_scale; see Problem.
        decoded: tensors whose float8_e4m3fn elements are decoded from bytes, where the target cannot convert them.
        shared_bytes: shared memory that the tile is computed to need, an upper bound.
    """

    target: Target
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
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    USE_TMA: bool
    USE_SUBTILING: bool
    OUTPUT_LOGSUMEXP: bool
    OUTPUT_MAX: bool
    OUTPUT_TAIL: bool
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
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    accumulator_dtype: torch.dtype
    unit_stride: frozenset[str]
    wide: frozenset[str]
    wide_index: bool
    lengths_dtype: torch.dtype | None
    K_SCALE: bool
    V_SCALE: str
    decoded: frozenset[str]
    decisions: tuple[Decision, ...]

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        amd = {name: getattr(self, name) for name in ("kpack", "matrix_instr_nonkdim", "waves_per_eu")}
        given = {name: value for name, value in amd.items() if value is not None}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **given}
