"""Fused attention, decoding, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     none: every key is live
tile         16 query rows x 64 keys, 4 warps, 3 stages   because: fits; guess: 32 KB of keys and values a
                 stage
keys         no mask: there is no mask
splits       counted by each launch   because: each launch counts: as many as run at once, each of a few tiles
                 at least
rows safe    no   because: a split may hold no live key of a row
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=False, OUTPUT_MAX=False,
                 OUTPUT_TAIL=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(16)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(128)
V_HEAD_DIM = tl.constexpr(128)
V_HEAD_DIM_ROUNDED = tl.constexpr(128)
GQA_SHARED_HEADS = tl.constexpr(4)
SM_SCALE = tl.constexpr(0.08838834764831843)
SCALE_LOG2_E = tl.constexpr(0.12751743082459868)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled
PARTIAL_WIDTH = tl.constexpr(132)  # elements of a partial row: V_HEAD_DIM, then its maximum and sum
COMBINE_SPLITS = tl.constexpr(64)  # splits that are combined at a time


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        column_exists = kv_idx < KV_LEN
        if CHECKED:
            key = tl.load(
                key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        score = tl.dot(query, key.T)
        if CHECKED:
            score = tl.where(column_exists[None, :], score, float("-inf"))

        # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp2((row_max - new_max) * SCALE_LOG2_E)
        weight = tl.exp2(score * SCALE_LOG2_E - (new_max * SCALE_LOG2_E)[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max

        acc = rescale(acc, alpha)
        if CHECKED:
            value = tl.load(
                value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    partials_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_b,
    key_stride_h,
    key_stride_kv,
    value_stride_b,
    value_stride_h,
    value_stride_kv,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
):
    """Attend to one split of the keys. A single split writes the outputs, of several each writes a partial result."""
    # One program computes BLOCK_M rows of one key/value head; a row is one query of one of its query heads.
    tiles_per_head = tl.cdiv(Q_LEN * GQA_SHARED_HEADS, BLOCK_M)
    row_tile = tl.program_id(0) % tiles_per_head
    kv_heads = Q_HEADS // GQA_SHARED_HEADS
    b = tl.program_id(0) // tiles_per_head // kv_heads
    kv_head = tl.program_id(0) // tiles_per_head % kv_heads
    packed = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_idx = packed // GQA_SHARED_HEADS
    h = kv_head * GQA_SHARED_HEADS + packed % GQA_SHARED_HEADS
    row_exists = q_idx < Q_LEN
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)[:, None]
    key_ptr += batch * key_stride_b + kv_head.to(tl.int64) * key_stride_h
    value_ptr += batch * value_stride_b + kv_head.to(tl.int64) * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    query_ptr += batch * query_stride_b
    query = tl.load(
        query_ptr + head * query_stride_h + q_idx[:, None] * query_stride_q + qk_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )

    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_ROUNDED], tl.float32)
    row_max = tl.full([BLOCK_M], ROW_MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # there is no mask
    lo = 0
    hi = tl.cdiv(KV_LEN, BLOCK_N)
    full_hi = KV_LEN // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    # This program's share of those tiles.
    per_split = tl.cdiv(tl.maximum(hi - lo, 0), splits)
    lo = tl.minimum(lo + split * per_split, hi)
    hi = tl.minimum(lo + per_split, hi)
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN,
        lo, full_hi, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN,
        full_hi, hi, True,
    )

    if splits == 1:
        # A row without a live key has row_sum 0: its output is 0.
        row_is_empty = row_sum == 0.0
        output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
        v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
        output_ptr += batch * output_stride_b
        tl.store(
            output_ptr + head * output_stride_h + q_idx[:, None] * output_stride_q + v_dim[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=row_exists[:, None],
        )
    else:
        v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
        partial_row = ((batch * Q_HEADS + h) * Q_LEN + q_idx) * splits + split
        partial_ptr = partials_ptr + partial_row * PARTIAL_WIDTH
        tl.store(partial_ptr[:, None] + v_dim[None, :], acc, mask=row_exists[:, None])
        tl.store(partial_ptr + V_HEAD_DIM, row_max, mask=row_exists)
        tl.store(partial_ptr + V_HEAD_DIM + 1, row_sum, mask=row_exists)


@triton.jit
def combine(
    partials_ptr,
    output_ptr,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    Q_LEN,
    Q_HEADS,
    splits,
):
    """Merge the partial results of one row; a split without a live key counts nothing."""
    query_row = tl.program_id(0).to(tl.int64)
    q_idx = (query_row % Q_LEN).to(tl.int32) + tl.arange(0, 1)
    head = query_row // Q_LEN % Q_HEADS
    batch = query_row // Q_LEN // Q_HEADS
    partials_ptr += query_row * splits * PARTIAL_WIDTH
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)

    acc = tl.zeros([1, V_HEAD_DIM_ROUNDED], tl.float32)
    row_max = tl.full([1], ROW_MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for first in tl.range(0, splits, COMBINE_SPLITS):
        split = first + tl.arange(0, COMBINE_SPLITS)
        split_exists = split < splits
        partial_ptr = partials_ptr + split * PARTIAL_WIDTH
        split_max = tl.load(partial_ptr + V_HEAD_DIM, mask=split_exists, other=ROW_MAX_FLOOR)
        split_sum = tl.load(partial_ptr + V_HEAD_DIM + 1, mask=split_exists, other=0.0)
        split_acc = tl.load(
            partial_ptr[:, None] + v_dim[None, :],
            mask=split_exists[:, None],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(split_max, 0))
        alpha = tl.exp2((row_max - new_max) * SCALE_LOG2_E)
        weight = tl.exp2((split_max - new_max) * SCALE_LOG2_E)
        row_sum = row_sum * alpha + tl.sum(split_sum * weight, 0)
        acc = acc * alpha[:, None] + tl.sum(split_acc * weight[:, None], 0)[None, :]
        row_max = new_max

    # A row without a live key has row_sum 0: its output is 0.
    row_is_empty = row_sum == 0.0
    output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
    )
