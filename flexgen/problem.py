"""What is static about a call (`Problem`) and which class of run-time facts a plan may rely on (`Guard`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class TableForm:
    """The static part of a block table.

    Attributes:
        q_block_size, kv_block_size: the sides of a block.
        has_full_blocks: full blocks are listed apart from partial ones.
        derived: made from the call's own mask, as one compact list; else a block mask's, whose lists alone say what
            is visited.
    """

    q_block_size: int
    kv_block_size: int
    has_full_blocks: bool
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts of a call; equal problems may share a plan.

    Attributes:
        query_dtype, key_dtype, value_dtype: element dtypes.
        qk_head_dim, v_head_dim: last dimension of query and key, and of value.
        group: query heads for each key/value head (GQA_SHARED_HEADS).
        unit_stride: tensors ("query", "key", "value") whose last dimension has stride 1.
        scale: the softmax scale as a constant; None when it is a run-time argument.
        table: the block table's form, when the call brings one.
        output_logsumexp, output_max: which auxiliary outputs are asked for.
        has_offsets: q_idx and kv_idx start at run-time offsets instead of 0.
        lengths_dtype: dtype of kv_lengths, the number of keys of each batch row, where the call brings it; else every
            row has all keys.
        page_size: keys of a page, where key and value lie in pages that a page table lists; 0 where they do not.
        k_scale: a factor of the scores is read for each key head.
        v_scale: a factor of the output, "head" where it is read for each key head, "number" where it is an argument.
        dropout: softmax weights are dropped, with a probability that is a run-time argument.
        cu_seqlens: dtype of the offsets of sequences that are packed along the length; None where none are.
    """

    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    qk_head_dim: int
    v_head_dim: int
    group: int = 1
    unit_stride: frozenset[str] = frozenset({"query", "key", "value"})
    scale: float | None = None
    table: TableForm | None = None
    output_logsumexp: bool = False
    output_max: bool = False
    has_offsets: bool = False
    lengths_dtype: torch.dtype | None = None
    page_size: int = 0
    k_scale: bool = False
    v_scale: Literal["", "head", "number"] = ""
    dropout: bool = False
    cu_seqlens: torch.dtype | None = None

    @property
    def converts_keys(self) -> bool:
        """Keys and values are stored in 8 bits and multiplied in the query's dtype."""
        return self.key_dtype != self.query_dtype or self.value_dtype != self.query_dtype

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Scores and sums are float32; float64 inputs keep float64."""
        return torch.float64 if self.query_dtype == torch.float64 else torch.float32


LENGTH_BUCKETS = (1, 4, 16, 32, 64, 128)
DIVISOR = 128  # one divisibility class only: a decode loop then needs at most two kernels
INDEX_LIMIT = 1 << 29  # below this, sums of a few indices and a buffer's size fit 32 bits
GRID_LIMIT = (1 << 16) - 1  # programs along the second and the third dimension of a grid, on NVIDIA's chips
SIZE_LIMIT = 1 << 30  # sizes of buffers that are addressed with 32 bits


@dataclass(frozen=True, slots=True)
class Guard:
    """What a plan assumes about a launch; computed from every launch and part of the kernel's key.

    Attributes:
        q_bucket, kv_bucket: smallest of LENGTH_BUCKETS that holds the length; 0 when it is longer than all.
        q_divisible, kv_divisible: the length is a multiple of DIVISOR.
        wide: names of tensors and buffers with element offsets of 2**31 or more inside one (batch, head), or
            anywhere for a captured buffer.
        aligned: tensors among "query", "key" and "value" that the copy engine can address: the address and the strides
            are multiples of 16 bytes.
        rows_safe_holds: the assumptions of the proof that every row has a live key are met.
        wide_index: a length is INDEX_LIMIT or more, so index arithmetic keeps 64 bits.
        crowded: there are more heads or batch entries than GRID_LIMIT.
    """

    q_bucket: int
    kv_bucket: int
    q_divisible: bool
    kv_divisible: bool
    wide: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset({"query", "key", "value"})
    rows_safe_holds: bool = False
    wide_index: bool = False
    crowded: bool = False


def bucket(length: int) -> int:
    """Return the smallest bucket that holds `length`, or 0."""
    return next((limit for limit in LENGTH_BUCKETS if length <= limit), 0)
