"""Fused attention, backward, dQ, for sm_90. Written by flexgen.

score_mod    learned_slope
mask_mod     causal_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
sequences    packed: a tile searches its sequence: one load for up to 128, less than a map's own launch costs
keys         closed form: mask is an interval in kv_idx: [0, q_idx + 1)
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=False, FAST_TANH=False,
                 LONG_ROWS_FIRST=True
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
SEARCH_WIDTH = tl.constexpr(128)  # sequences that a tile compares at a time
SM_SCALE = tl.constexpr(0.125)
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are computed in base 2


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, slope_ptr, slope_stride0, slope_size0, slope_size1):
    """learned_slope: the score of one (query, key) pair; indices broadcast to the tile."""
    # return score - slope[b, h] * (q_idx - kv_idx)
    slope_at_b_h = tl.load(
        slope_ptr + b * slope_stride0 + h,
        mask=(b < slope_size0) & (h < slope_size1),
        other=0.0,
    )
    return score - slope_at_b_h * (q_idx - kv_idx).to(tl.float32)


@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@triton.jit
def contribution_slope(score, grad, b, h, q_idx, kv_idx):
    """What each (query, key) pair adds to the gradient of slope."""
    return grad * -(q_idx - kv_idx).to(tl.float32)


@triton.jit
def scatter_slope(
    value, exists, b, h, q_idx, kv_idx, grad_slope_ptr, grad_slope_stride0, grad_slope_stride1, slope_size0,
    slope_size1,
):
    """Add values to the gradient of slope; many may meet in one element."""
    tl.atomic_add(
        grad_slope_ptr + b * grad_slope_stride0 + h * grad_slope_stride1, value,
        mask=exists & (b < slope_size0) & (h < slope_size1),
        sem="relaxed",
    )


@triton.jit
def sequence_of(tile, cu_seqlens_ptr, SEQUENCES, BLOCK: tl.constexpr):
    """Return the sequence that a tile of BLOCK tokens lies in; SEQUENCES for what lies behind the last one.

    Sequence i begins at tile cu_seqlens[i] // BLOCK + i, which leaves it as many tiles as its tokens fill, or one more.
    So the last sequence that begins up to a tile is its own, and no lengths are summed up.
    """
    found = 0
    step = 1
    while step * SEARCH_WIDTH < SEQUENCES:
        step *= SEARCH_WIDTH
    while step > 0:
        sequence = found + step * (1 + tl.arange(0, SEARCH_WIDTH))
        exists = sequence <= SEQUENCES
        begin = tl.load(cu_seqlens_ptr + sequence, mask=exists, other=0)
        begun = exists & (begin // BLOCK + sequence <= tile)
        found += step * tl.sum(begun.to(tl.int32), 0)
        step //= SEARCH_WIDTH
    return found


@triton.jit
def accumulate(
    grad_query, grad_slope, query, grad_output, row_shift, delta,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    row_exists,
    slope_ptr, slope_stride0, slope_size0, slope_size1, grad_slope_ptr,
    grad_slope_stride0, grad_slope_stride1,
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
        modified = score_mod(
            score, b, h, q_idx[:, None], kv_idx[None, :], slope_ptr, slope_stride0, slope_size0, slope_size1,
        )
        weight = tl.exp2(modified * LOG2_E - row_shift[:, None])
        if CHECKED:
            live = column_exists[None, :] & mask_mod(b, h, q_idx[:, None], kv_idx[None, :])
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
        share_of_slope = contribution_slope(score, grad_score, b, h, q_idx[:, None], kv_idx[None, :])
        if CHECKED:
            share_of_slope = tl.where(row_exists[:, None] & live, share_of_slope, 0.0)
        else:
            share_of_slope = tl.where(row_exists[:, None], share_of_slope, 0.0)
        grad_slope += tl.sum(tl.sum(share_of_slope, 1), 0)
        grad_query = tl.dot(grad_score.to(key.dtype), key, grad_query)
    return grad_query, grad_slope


@triton.jit
def backward_dq(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_output_ptr,
    grad_query_ptr,
    row_shift_ptr,
    delta_ptr,
    query_stride_h,
    query_stride_q,
    key_stride_h,
    key_stride_kv,
    value_stride_h,
    value_stride_kv,
    grad_output_stride_h,
    grad_output_stride_q,
    grad_query_stride_h,
    grad_query_stride_q,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    Q_TOTAL,
    SEQUENCES,
    Q_HEADS,
    slope_ptr,
    slope_stride0,
    slope_size0,
    slope_size1,
    grad_slope_ptr,
    grad_slope_stride0,
    grad_slope_stride1,
):
    # One program computes the gradient of BLOCK_M queries of one query head.
    h = tl.program_id(0) % Q_HEADS
    tiles = tl.cdiv(Q_TOTAL, BLOCK_M) + SEQUENCES
    row_tile = tiles - 1 - tl.program_id(0) // Q_HEADS  # the longest rows of a sequence start first
    b = sequence_of(row_tile, cu_seqlens_q_ptr, SEQUENCES, BLOCK_M)
    q_begin = tl.load(cu_seqlens_q_ptr + b)
    kv_begin = tl.load(cu_seqlens_k_ptr + b)
    # What lies behind the last sequence are queries without keys.
    Q_LEN = tl.load(cu_seqlens_q_ptr + b + 1, mask=b < SEQUENCES, other=Q_TOTAL) - q_begin
    KV_LEN = tl.load(cu_seqlens_k_ptr + tl.minimum(b + 1, SEQUENCES)) - kv_begin
    q_start = (row_tile - q_begin // BLOCK_M - b) * BLOCK_M
    if q_start >= Q_LEN:
        return  # the tile that its sequence has no token for
    q_idx = q_start + tl.arange(0, BLOCK_M)
    row_exists = q_idx < Q_LEN

    # Offsets of sequences and heads are 64-bit: whole tensors may pass 2**31 elements.
    q_base = q_begin.to(tl.int64)
    kv_base = kv_begin.to(tl.int64)
    head = h.to(tl.int64)
    query_ptr += q_base * query_stride_q + head * query_stride_h
    grad_output_ptr += q_base * grad_output_stride_q + head * grad_output_stride_h
    key_ptr += kv_base * key_stride_kv + head * key_stride_h
    value_ptr += kv_base * value_stride_kv + head * value_stride_h
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
    aux_offset = head * Q_TOTAL + q_base + q_idx
    row_shift = tl.load(row_shift_ptr + aux_offset, mask=row_exists, other=float("inf")) * LOG2_E
    delta = tl.load(delta_ptr + aux_offset, mask=row_exists, other=0.0)

    grad_query = tl.zeros([BLOCK_M, QK_HEAD_DIM_ROUNDED], tl.float32)
    grad_slope = tl.full([], 0.0, tl.float32)
    q_lo = q_start
    q_hi = tl.minimum(q_start + BLOCK_M, Q_LEN) - 1
    # [0, q_idx + 1)
    lo = 0
    hi = tl.cdiv(tl.minimum(q_hi + 1, KV_LEN), BLOCK_N)
    full_hi = tl.minimum(q_lo + 1, KV_LEN) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    grad_query, grad_slope = accumulate(
        grad_query, grad_slope, query, grad_output, row_shift, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx, row_exists,
        slope_ptr, slope_stride0, slope_size0, slope_size1, grad_slope_ptr,
        grad_slope_stride0, grad_slope_stride1,
        lo, full_hi, False,
    )
    grad_query, grad_slope = accumulate(
        grad_query, grad_slope, query, grad_output, row_shift, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx, row_exists,
        slope_ptr, slope_stride0, slope_size0, slope_size1, grad_slope_ptr,
        grad_slope_stride0, grad_slope_stride1,
        full_hi, hi, True,
    )

    grad_query = grad_query * SM_SCALE
    grad_query_ptr += q_base * grad_query_stride_q + head * grad_query_stride_h
    tl.store(
        grad_query_ptr + q_idx[:, None] * grad_query_stride_q + qk_dim[None, :],
        grad_query.to(grad_query_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )
    scatter_slope(
        grad_slope, tl.full([], True, tl.int1), b, h, 0, 0, grad_slope_ptr, grad_slope_stride0,
        grad_slope_stride1, slope_size0, slope_size1,
    )
