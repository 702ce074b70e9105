"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    relative
mask_mod     none: every key is live
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
queries      no mask: there is no mask
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
def accumulate(
    grad_key, grad_value, key, value,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, logsumexp_tail_ptr,
    delta_ptr, Q_LEN,
    b, h, kv_idx,
    table_size0, table_ptr,
    first, last, CHECKED: tl.constexpr,
):
    """Add to grad_key and grad_value what query tiles first to last - 1 contribute.

    Tiles of scores are transposed here: [BLOCK_N keys, BLOCK_M queries].
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        q_start = tile * BLOCK_M
        q_idx = q_start + tl.arange(0, BLOCK_M)
        row_exists = q_idx < Q_LEN
        if CHECKED:
            query = tl.load(
                query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :],
                mask=row_exists[:, None],
                other=0.0,
            )
        else:
            query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])
        row_shift = tl.load(row_shift_ptr + q_idx, mask=row_exists, other=float("inf"))
        row_tail = tl.load(logsumexp_tail_ptr + q_idx, mask=row_exists, other=0.0)
        delta = tl.load(delta_ptr + q_idx, mask=row_exists, other=0.0)
        score = tl.dot(key, query.T)
        score = score * SM_SCALE
        modified = score_mod(score, b, h, q_idx[None, :], kv_idx[:, None], table_size0, table_ptr)
        weight = tl.exp2((modified - row_shift[None, :] - row_tail[None, :]) * LOG2_E)
        if CHECKED:
            live = row_exists[None, :]
            weight = tl.where(live, weight, 0.0)
        if CHECKED:
            grad_output = tl.load(
                grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :],
                mask=row_exists[:, None],
                other=0.0,
            )
        else:
            grad_output = tl.load(grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :])
        grad_value = tl.dot(weight.to(grad_output.dtype), grad_output, grad_value)
        grad_weight = tl.dot(value, grad_output.T)
        grad_score = weight * (grad_weight - delta[None, :])
        grad_key = tl.dot(grad_score.to(query.dtype), query, grad_key)
    return grad_key, grad_value


@triton.jit
def backward_dkdv(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_output_ptr,
    grad_key_ptr,
    grad_value_ptr,
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
    grad_key_stride_b,
    grad_key_stride_h,
    grad_key_stride_kv,
    grad_value_stride_b,
    grad_value_stride_h,
    grad_value_stride_kv,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
    table_size0,
    table_ptr,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_key and grad_value.
    tiles_per_head = tl.cdiv(KV_LEN, BLOCK_N)
    kv_tile = tl.program_id(0) % tiles_per_head
    kv_heads = Q_HEADS
    b = tl.program_id(0) // tiles_per_head // kv_heads
    kv_head = tl.program_id(0) // tiles_per_head % kv_heads
    kv_start = kv_tile * BLOCK_N
    kv_idx = kv_start + tl.arange(0, BLOCK_N)
    column_exists = kv_idx < KV_LEN

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    key_ptr += batch * key_stride_b + wide_kv_head * key_stride_h
    value_ptr += batch * value_stride_b + wide_kv_head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    key = tl.load(
        key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :],
        mask=column_exists[:, None],
        other=0.0,
    )
    value = tl.load(
        value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
        mask=column_exists[:, None],
        other=0.0,
    )

    grad_key = tl.zeros([BLOCK_N, QK_HEAD_DIM_ROUNDED], tl.float32)
    grad_value = tl.zeros([BLOCK_N, V_HEAD_DIM_ROUNDED], tl.float32)
    h = kv_head
    head = h.to(tl.int64)
    head_query_ptr = query_ptr + batch * query_stride_b + head * query_stride_h
    head_grad_output_ptr = grad_output_ptr + batch * grad_output_stride_b + head * grad_output_stride_h
    aux_offset = (batch * Q_HEADS + head) * Q_LEN
    # there is no mask
    lo = 0
    hi = tl.cdiv(Q_LEN, BLOCK_M)
    full_hi = Q_LEN // BLOCK_M
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    grad_key, grad_value = accumulate(
        grad_key, grad_value, key, value,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, logsumexp_tail_ptr + aux_offset,
        delta_ptr + aux_offset, Q_LEN, b, h, kv_idx,
        table_size0, table_ptr,
        lo, full_hi, False,
    )
    grad_key, grad_value = accumulate(
        grad_key, grad_value, key, value,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, logsumexp_tail_ptr + aux_offset,
        delta_ptr + aux_offset, Q_LEN, b, h, kv_idx,
        table_size0, table_ptr,
        full_hi, hi, True,
    )

    grad_key = grad_key * SM_SCALE
    grad_key_ptr += batch * grad_key_stride_b + wide_kv_head * grad_key_stride_h
    tl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + qk_dim[None, :],
        grad_key.to(grad_key_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )

    grad_value_ptr += batch * grad_value_stride_b + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )
