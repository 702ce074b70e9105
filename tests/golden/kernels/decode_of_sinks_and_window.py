"""Fused attention, decoding, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     sink_mask
tile         16 query rows x 128 keys, 4 warps, 3 stages   because: fits; guess: 32 KB of keys and values a
                 stage
keys         closed form: mask is a union of 2 intervals in kv_idx: [0, min(4, position[b] + q_idx + 1)) and
                 [position[b] + q_idx - 255, position[b] + q_idx + 1)
splits       counted by each launch   because: each launch counts: as many as run at once, each of a few tiles
                 at least
rows safe    no   because: a split may hold no live key of a row
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=True, OUTPUT_MAX=True,
                 OUTPUT_TAIL=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(16)
BLOCK_N = tl.constexpr(128)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
GQA_SHARED_HEADS = tl.constexpr(3)
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled
PARTIAL_WIDTH = tl.constexpr(68)  # elements of a partial row: V_HEAD_DIM, then its maximum and sum
COMBINE_SPLITS = tl.constexpr(64)  # splits that are combined at a time


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, position_ptr, position_size0):
    """sink_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # distance = position[b] + q_idx - kv_idx
    position_at_b = tl.load(position_ptr + b, mask=b < position_size0, other=0)
    distance = position_at_b.to(tl.int64) + q_idx - kv_idx
    # return (distance >= 0) & ((distance < window) | (kv_idx < sinks))
    return (distance >= 0) & ((distance < 256) | (kv_idx < 4))


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    position_ptr, position_size0,
    first, last, gap_0, width_0, gap_1, width_1, gap_2, width_2, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1.

    Of each gap, `width` tiles from `gap` on, nothing is visited.
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for step in tl.range(first, last - width_0 - width_1 - width_2):
        tile = step + tl.where(step >= gap_0, width_0, 0)
        tile = tile + tl.where(tile >= gap_1, width_1, 0)
        tile = tile + tl.where(tile >= gap_2, width_2, 0)
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
            score = tl.where(
                column_exists[None, :] & mask_mod(
                    b, h[:, None], q_idx[:, None], kv_idx[None, :], position_ptr, position_size0,
                ),
                score, float("-inf"),
            )

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
def share(lo, hi, first, past):
    """Return the part of tiles [lo, hi) that lies in [first, past), both counted from lo."""
    count = hi - lo
    return lo + tl.minimum(tl.maximum(first, 0), count), lo + tl.minimum(tl.maximum(past, 0), count)


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    logsumexp_ptr,
    max_scores_ptr,
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
    position_ptr,
    position_size0,
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

    q_lo = row_tile * BLOCK_M // GQA_SHARED_HEADS
    q_hi = tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // GQA_SHARED_HEADS, Q_LEN - 1)
    # [0, min(4, position[b] + q_idx + 1))
    lo_0 = 0
    position_at_b = tl.load(position_ptr + b, mask=b < position_size0, other=0)
    hi_0 = tl.cdiv(
        tl.minimum(tl.maximum(tl.minimum(4, position_at_b.to(tl.int64) + q_hi + 1), 0), KV_LEN).to(tl.int32),
        BLOCK_N,
    )
    full_lo_0 = 0
    full_hi_0 = tl.minimum(
        tl.maximum(tl.minimum(4, position_at_b.to(tl.int64) + q_lo + 1), 0), KV_LEN,
    ).to(tl.int32) // BLOCK_N
    # [position[b] + q_idx - 255, position[b] + q_idx + 1)
    lo_1 = tl.minimum(tl.maximum(position_at_b.to(tl.int64) + q_lo - 255, 0), KV_LEN).to(tl.int32) // BLOCK_N
    hi_1 = tl.cdiv(
        tl.minimum(tl.maximum(position_at_b.to(tl.int64) + q_hi + 1, 0), KV_LEN).to(tl.int32), BLOCK_N,
    )
    full_lo_1 = tl.cdiv(
        tl.minimum(tl.maximum(position_at_b.to(tl.int64) + q_hi - 255, 0), KV_LEN).to(tl.int32), BLOCK_N,
    )
    full_hi_1 = tl.minimum(
        tl.maximum(position_at_b.to(tl.int64) + q_lo + 1, 0), KV_LEN,
    ).to(tl.int32) // BLOCK_N
    # Visit each tile once: a segment starts where the ones before it have ended.
    hi_0 = tl.maximum(hi_0, lo_0)
    full_lo_0 = tl.minimum(tl.maximum(full_lo_0, lo_0), hi_0)
    full_hi_0 = tl.minimum(tl.maximum(full_hi_0, full_lo_0), hi_0)
    lo_1 = tl.maximum(lo_1, hi_0)
    hi_1 = tl.maximum(hi_1, lo_1)
    full_lo_1 = tl.minimum(tl.maximum(full_lo_1, lo_1), hi_1)
    full_hi_1 = tl.minimum(tl.maximum(full_hi_1, full_lo_1), hi_1)
    # This program's share of those tiles.
    tiles_0 = hi_0 - lo_0
    tiles_1 = hi_1 - lo_1
    per_split = tl.cdiv(tiles_0 + tiles_1, splits)
    first = split * per_split
    past = first + per_split
    lo_0, hi_0 = share(lo_0, hi_0, first, past)
    lo_1, hi_1 = share(lo_1, hi_1, first - tiles_0, past - tiles_0)
    full_lo_0 = tl.minimum(tl.maximum(full_lo_0, lo_0), hi_0)
    full_hi_0 = tl.minimum(tl.maximum(full_hi_0, full_lo_0), hi_0)
    full_lo_1 = tl.minimum(tl.maximum(full_lo_1, lo_1), hi_1)
    full_hi_1 = tl.minimum(tl.maximum(full_hi_1, full_lo_1), hi_1)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        position_ptr, position_size0,
        full_lo_0, full_hi_1, full_hi_0, full_lo_1 - full_hi_0, full_hi_1, 0, full_hi_1, 0, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        position_ptr, position_size0,
        lo_0, hi_1, full_lo_0, full_hi_0 - full_lo_0, hi_0, lo_1 - hi_0, full_lo_1, full_hi_1 - full_lo_1,
        True,
    )

    if splits == 1:
        # A row without a live key has row_sum 0: its output is 0, its logsumexp and maximum -inf.
        row_is_empty = row_sum == 0.0
        output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
        v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
        output_ptr += batch * output_stride_b
        tl.store(
            output_ptr + head * output_stride_h + q_idx[:, None] * output_stride_q + v_dim[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=row_exists[:, None],
        )
        aux_offset = (batch * Q_HEADS + h) * Q_LEN + q_idx
        natural_max = row_max * SM_SCALE
        log_sum = tl.log(tl.where(row_is_empty, 1.0, row_sum))
        logsumexp = natural_max + log_sum
        logsumexp = tl.where(row_is_empty, float("-inf"), logsumexp)
        tl.store(logsumexp_ptr + aux_offset, logsumexp, mask=row_exists)
        max_score = tl.where(row_is_empty, float("-inf"), natural_max)
        max_score = tl.where(
            row_sum == row_sum,
            max_score, row_sum,
        )  # a NaN among the scores shows in the sum alone
        tl.store(max_scores_ptr + aux_offset, max_score, mask=row_exists)
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
    logsumexp_ptr,
    max_scores_ptr,
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

    # A row without a live key has row_sum 0: its output is 0, its logsumexp and maximum -inf.
    row_is_empty = row_sum == 0.0
    output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
    )
    aux_offset = (batch * Q_HEADS + head) * Q_LEN + q_idx
    natural_max = row_max * SM_SCALE
    log_sum = tl.log(tl.where(row_is_empty, 1.0, row_sum))
    logsumexp = natural_max + log_sum
    logsumexp = tl.where(row_is_empty, float("-inf"), logsumexp)
    tl.store(logsumexp_ptr + aux_offset, logsumexp)
    max_score = tl.where(row_is_empty, float("-inf"), natural_max)
    max_score = tl.where(
        row_sum == row_sum,
        max_score, row_sum,
    )  # a NaN among the scores shows in the sum alone
    tl.store(max_scores_ptr + aux_offset, max_score)
