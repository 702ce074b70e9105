"""Fused attention, backward, dQ, for sm_90. Written by flexgen.

score_mod    relative
mask_mod     none: every key is live
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
keys         no mask: there is no mask
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=False, FAST_TANH=False,
                 LONG_ROWS_FIRST=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
SM_SCALE = tl.constexpr(0.125)
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are computed in base 2


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, table_size0, table_ptr):
    """relative: the score of one (query, key) pair; indices broadcast to the tile."""
    # return score + table[q_idx - kv_idx + 1023]
    sum_ = q_idx - kv_idx + 1023
    table_index = tl.where(sum_ < 0, sum_ + table_size0, sum_)
    table_at_q_kv = tl.load(
        table_ptr + table_index,
        mask=(table_index >= 0) & (table_index < table_size0),
        other=0.0,
    )
    return score + table_at_q_kv


@triton.jit
def contribution_table(score, grad, b, h, q_idx, kv_idx):
    """What each (query, key) pair adds to the gradient of table."""
    return grad


@triton.jit
def scatter_table(value, exists, b, h, q_idx, kv_idx, grad_table_ptr, grad_table_stride0, table_size0):
    """Add values to the gradient of table; many may meet in one element."""
    sum_ = q_idx - kv_idx + 1023
    table_index = tl.where(sum_ < 0, sum_ + table_size0, sum_)
    tl.atomic_add(
        grad_table_ptr + table_index * grad_table_stride0, value,
        mask=exists & (table_index >= 0) & (table_index < table_size0),
        sem="relaxed",
    )


@triton.jit
def accumulate(
    grad_query, query, grad_output, row_shift, row_tail, delta,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    row_exists,
    table_size0, table_ptr, grad_table_ptr, grad_table_stride0,
    first, last, CHECKED: tl.constexpr,
):
    """Add to grad_query what key tiles first to last - 1 contribute."""
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
        score = score * SM_SCALE
        modified = score_mod(score, b, h, q_idx[:, None], kv_idx[None, :], table_size0, table_ptr)
        weight = tl.exp2((modified - row_shift[:, None] - row_tail[:, None]) * LOG2_E)
        if CHECKED:
            live = column_exists[None, :]
            weight = tl.where(live, weight, 0.0)
        if CHECKED:
            value = tl.load(
                value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        grad_weight = tl.dot(grad_output, value.T)
        grad_score = weight * (grad_weight - delta[:, None])
        if CHECKED:
            counts = tl.broadcast_to(row_exists[:, None] & live, score.shape)
        else:
            counts = tl.broadcast_to(row_exists[:, None], score.shape)
        share_of_table = contribution_table(score, grad_score, b, h, q_idx[:, None], kv_idx[None, :])
        scatter_table(
            share_of_table, counts, b, h, q_idx[:, None], kv_idx[None, :], grad_table_ptr, grad_table_stride0,
            table_size0,
        )
        grad_query = tl.dot(grad_score.to(key.dtype), key, grad_query)
    return grad_query


@triton.jit
def backward_dq(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_output_ptr,
    grad_query_ptr,
    row_shift_ptr,
    logsumexp_tail_ptr,
    delta_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_b,
    key_stride_h,
    key_stride_kv,
    value_stride_b,
    value_stride_h,
    value_stride_kv,
    grad_output_stride_b,
    grad_output_stride_h,
    grad_output_stride_q,
    grad_query_stride_b,
    grad_query_stride_h,
    grad_query_stride_q,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
    table_size0,
    table_ptr,
    grad_table_ptr,
    grad_table_stride0,
):
    # One program computes the gradient of BLOCK_M queries of one query head.
    tiles_per_head = tl.cdiv(Q_LEN, BLOCK_M)
    row_tile = tl.program_id(0) % tiles_per_head
    b = tl.program_id(0) // tiles_per_head // Q_HEADS
    h = tl.program_id(0) // tiles_per_head % Q_HEADS
    q_start = row_tile * BLOCK_M
    q_idx = q_start + tl.arange(0, BLOCK_M)
    row_exists = q_idx < Q_LEN

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    query_ptr += batch * query_stride_b + head * query_stride_h
    grad_output_ptr += batch * grad_output_stride_b + head * grad_output_stride_h
    key_ptr += batch * key_stride_b + head * key_stride_h
    value_ptr += batch * value_stride_b + head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    query = tl.load(
        query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    grad_output = tl.load(
        grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    aux_offset = (batch * Q_HEADS + head) * Q_LEN + q_idx
    row_shift = tl.load(row_shift_ptr + aux_offset, mask=row_exists, other=float("inf"))
    row_tail = tl.load(logsumexp_tail_ptr + aux_offset, mask=row_exists, other=0.0)
    delta = tl.load(delta_ptr + aux_offset, mask=row_exists, other=0.0)

    grad_query = tl.zeros([BLOCK_M, QK_HEAD_DIM_ROUNDED], tl.float32)
    # there is no mask
    lo = 0
    hi = tl.cdiv(KV_LEN, BLOCK_N)
    full_hi = KV_LEN // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, row_tail, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx, row_exists,
        table_size0, table_ptr, grad_table_ptr, grad_table_stride0,
        lo, full_hi, False,
    )
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, row_tail, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx, row_exists,
        table_size0, table_ptr, grad_table_ptr, grad_table_stride0,
        full_hi, hi, True,
    )

    grad_query = grad_query * SM_SCALE
    grad_query_ptr += batch * grad_query_stride_b + head * grad_query_stride_h
    tl.store(
        grad_query_ptr + q_idx[:, None] * grad_query_stride_q + qk_dim[None, :],
        grad_query.to(grad_query_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )
