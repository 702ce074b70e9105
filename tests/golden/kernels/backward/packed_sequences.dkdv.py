"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    learned_slope
mask_mod     causal_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
sequences    packed: a tile searches its sequence: one load for up to 128, less than a map's own launch costs
queries      closed form: mask is an interval in q_idx: [kv_idx, Q_LEN)
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
    grad_key, grad_value, key, value,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, delta_ptr, Q_LEN, b,
    h, kv_idx,
    slope_ptr, slope_stride0, slope_size0, slope_size1,
    first, last, gap_0, width_0, CHECKED: tl.constexpr,
):
    """Add to grad_key and grad_value what query tiles first to last - 1, but for gaps, contribute.

    Tiles of scores are transposed here: [BLOCK_N keys, BLOCK_M queries].
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for step in tl.range(first, last - width_0):
        tile = step + tl.where(step >= gap_0, width_0, 0)
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
        row_shift = tl.load(row_shift_ptr + q_idx, mask=row_exists, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + q_idx, mask=row_exists, other=0.0)
        score = tl.dot(key, query.T)
        score = score * SM_SCALE
        modified = score_mod(
            score, b, h, q_idx[None, :], kv_idx[:, None], slope_ptr, slope_stride0, slope_size0, slope_size1,
        )
        weight = tl.exp2(modified * LOG2_E - row_shift[None, :])
        if CHECKED:
            live = row_exists[None, :] & mask_mod(b, h, q_idx[None, :], kv_idx[:, None])
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
    delta_ptr,
    query_stride_h,
    query_stride_q,
    key_stride_h,
    key_stride_kv,
    value_stride_h,
    value_stride_kv,
    grad_output_stride_h,
    grad_output_stride_q,
    grad_key_stride_h,
    grad_key_stride_kv,
    grad_value_stride_h,
    grad_value_stride_kv,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    Q_TOTAL,
    KV_TOTAL,
    SEQUENCES,
    Q_HEADS,
    slope_ptr,
    slope_stride0,
    slope_size0,
    slope_size1,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_key and grad_value.
    kv_heads = Q_HEADS
    kv_head = tl.program_id(0) % kv_heads
    kv_tile = tl.program_id(0) // kv_heads
    b = sequence_of(kv_tile, cu_seqlens_k_ptr, SEQUENCES, BLOCK_N)
    kv_begin = tl.load(cu_seqlens_k_ptr + b)
    q_begin = tl.load(cu_seqlens_q_ptr + b)
    # What lies behind the last sequence are keys without queries.
    KV_LEN = tl.load(cu_seqlens_k_ptr + b + 1, mask=b < SEQUENCES, other=KV_TOTAL) - kv_begin
    Q_LEN = tl.load(cu_seqlens_q_ptr + tl.minimum(b + 1, SEQUENCES)) - q_begin
    kv_start = (kv_tile - kv_begin // BLOCK_N - b) * BLOCK_N
    if kv_start >= KV_LEN:
        return  # the tile that its sequence has no token for
    kv_idx = kv_start + tl.arange(0, BLOCK_N)
    column_exists = kv_idx < KV_LEN

    # Offsets of sequences and heads are 64-bit: whole tensors may pass 2**31 elements.
    q_base = q_begin.to(tl.int64)
    kv_base = kv_begin.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    key_ptr += kv_base * key_stride_kv + wide_kv_head * key_stride_h
    value_ptr += kv_base * value_stride_kv + wide_kv_head * value_stride_h
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
    head_query_ptr = query_ptr + q_base * query_stride_q + head * query_stride_h
    head_grad_output_ptr = grad_output_ptr + q_base * grad_output_stride_q + head * grad_output_stride_h
    aux_offset = head * Q_TOTAL + q_base
    kv_lo = kv_start
    kv_hi = tl.minimum(kv_start + BLOCK_N, KV_LEN) - 1
    # [kv_idx, Q_LEN)
    lo = tl.minimum(kv_lo, Q_LEN) // BLOCK_M
    hi = tl.cdiv(Q_LEN, BLOCK_M)
    full_lo = tl.cdiv(tl.minimum(kv_hi, Q_LEN), BLOCK_M)
    full_hi = Q_LEN // BLOCK_M
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    grad_key, grad_value = accumulate(
        grad_key, grad_value, key, value,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, delta_ptr + aux_offset,
        Q_LEN, b, h, kv_idx,
        slope_ptr, slope_stride0, slope_size0, slope_size1,
        full_lo, full_hi, full_hi, 0, False,
    )
    grad_key, grad_value = accumulate(
        grad_key, grad_value, key, value,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, delta_ptr + aux_offset,
        Q_LEN, b, h, kv_idx,
        slope_ptr, slope_stride0, slope_size0, slope_size1,
        lo, hi, full_lo, full_hi - full_lo, True,
    )

    grad_key = grad_key * SM_SCALE
    grad_key_ptr += kv_base * grad_key_stride_kv + wide_kv_head * grad_key_stride_h
    tl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + qk_dim[None, :],
        grad_key.to(grad_key_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )

    grad_value_ptr += kv_base * grad_value_stride_kv + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )
