"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
queries      closed form: mask is an interval in q_idx: [kv_idx, Q_LEN)
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=False, FAST_TANH=False,
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
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are computed in base 2


@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@triton.jit
def accumulate(
    grad_value, key,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, b, h, kv_idx,
    first, last, gap_0, width_0, CHECKED: tl.constexpr,
):
    """Add to grad_value what query tiles first to last - 1, but for gaps, contribute.

    Tiles of scores are transposed here: [BLOCK_N keys, BLOCK_M queries].
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for step in tl.range(first, last - width_0):
        tile = step + tl.where(step >= gap_0, width_0, 0)
        q_start = tile * BLOCK_M
        q_idx = q_start + tl.arange(0, BLOCK_M)
        query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])
        row_shift = tl.load(row_shift_ptr + q_idx) * LOG2_E
        score = tl.dot(key, query.T)
        weight = tl.exp2(score * SCALE_LOG2_E - row_shift[None, :])
        if CHECKED:
            live = mask_mod(b, h, q_idx[None, :], kv_idx[:, None])
            weight = tl.where(live, weight, 0.0)
        grad_output = tl.load(grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :])
        grad_value = tl.dot(weight.to(grad_output.dtype), grad_output, grad_value)
    return grad_value


@triton.jit
def backward_dkdv(
    query_ptr,
    key_ptr,
    grad_output_ptr,
    grad_value_ptr,
    row_shift_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_b,
    key_stride_h,
    key_stride_kv,
    grad_output_stride_b,
    grad_output_stride_h,
    grad_output_stride_q,
    grad_value_stride_b,
    grad_value_stride_h,
    grad_value_stride_kv,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_value.
    tiles_per_head = tl.cdiv(KV_LEN, BLOCK_N)
    kv_tile = tl.program_id(0) % tiles_per_head
    kv_heads = Q_HEADS
    b = tl.program_id(0) // tiles_per_head // kv_heads
    kv_head = tl.program_id(0) // tiles_per_head % kv_heads
    kv_start = kv_tile * BLOCK_N
    kv_idx = kv_start + tl.arange(0, BLOCK_N)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    key_ptr += batch * key_stride_b + wide_kv_head * key_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])

    grad_value = tl.zeros([BLOCK_N, V_HEAD_DIM_ROUNDED], tl.float32)
    h = kv_head
    head = h.to(tl.int64)
    head_query_ptr = query_ptr + batch * query_stride_b + head * query_stride_h
    head_grad_output_ptr = grad_output_ptr + batch * grad_output_stride_b + head * grad_output_stride_h
    aux_offset = (batch * Q_HEADS + head) * Q_LEN
    kv_lo = kv_start
    kv_hi = kv_start + BLOCK_N - 1
    # [kv_idx, Q_LEN)
    lo = tl.minimum(kv_lo, Q_LEN) // BLOCK_M
    hi = tl.cdiv(Q_LEN, BLOCK_M)
    full_lo = tl.cdiv(tl.minimum(kv_hi, Q_LEN), BLOCK_M)
    full_hi = Q_LEN // BLOCK_M
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    grad_value = accumulate(
        grad_value, key,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, b,
        h, kv_idx,
        full_lo, full_hi, full_hi, 0, False,
    )
    grad_value = accumulate(
        grad_value, key,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, b,
        h, kv_idx,
        lo, hi, full_lo, full_hi - full_lo, True,
    )

    grad_value_ptr += batch * grad_value_stride_b + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
    )
