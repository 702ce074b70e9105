"""Fused attention, backward, dQ, for sm_90. Written by flexgen.

score_mod    softcap
mask_mod     causal_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
keys         closed form: mask is an interval in kv_idx: [0, q_idx + 1)
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=False, FAST_TANH=True,
                 LONG_ROWS_FIRST=True
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
GQA_SHARED_HEADS = tl.constexpr(2)
SM_SCALE = tl.constexpr(0.125)
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are computed in base 2


@triton.jit
def tanh_approx(x):
    """Hyperbolic tangent by the hardware's instruction (relative error about 2**-11)."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, bias_ptr, bias_stride0, bias_size0, bias_size1):
    """softcap: the score of one (query, key) pair; indices broadcast to the tile."""
    # return cap * torch.tanh(score / cap) + bias[h, kv_idx]
    bias_at_h_kv = tl.load(
        bias_ptr + h * bias_stride0 + kv_idx,
        mask=(h < bias_size0) & (kv_idx < bias_size1),
        other=0.0,
    )
    return tanh_approx(score / 20.0) * 20.0 + bias_at_h_kv


@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@triton.jit
def score_grad(score, grad, b, h, q_idx, kv_idx):
    """The gradient of each raw score, from that of what score_mod returned."""
    # return cap * torch.tanh(score / cap) + bias[h, kv_idx]
    tanh_value = tanh_approx(score / 20.0)
    return grad * (1.0 - tanh_value * tanh_value)


@triton.jit
def accumulate(
    grad_query, query, grad_output, row_shift, row_tail, delta,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
    bias_ptr, bias_stride0, bias_size0, bias_size1,
    first, last, CHECKED: tl.constexpr,
):
    """Add to grad_query what key tiles first to last - 1 contribute."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        score = tl.dot(query, key.T)
        score = score * SM_SCALE
        modified = score_mod(
            score, b, h, q_idx[:, None], kv_idx[None, :], bias_ptr, bias_stride0, bias_size0, bias_size1,
        )
        weight = tl.exp2((modified - row_shift[:, None] - row_tail[:, None]) * LOG2_E)
        if CHECKED:
            live = mask_mod(b, h, q_idx[:, None], kv_idx[None, :])
            weight = tl.where(live, weight, 0.0)
        value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        grad_weight = tl.dot(grad_output, value.T)
        grad_score = weight * (grad_weight - delta[:, None])
        grad_score = score_grad(score, grad_score, b, h, q_idx[:, None], kv_idx[None, :])
        if CHECKED:
            grad_score = tl.where(live, grad_score, 0.0)
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
    bias_ptr,
    bias_stride0,
    bias_size0,
    bias_size1,
):
    # One program computes the gradient of BLOCK_M queries of one query head.
    tiles_per_head = tl.cdiv(Q_LEN, BLOCK_M)
    row_tile = tiles_per_head - 1 - tl.program_id(0) % tiles_per_head  # the longest rows start first
    b = tl.program_id(0) // tiles_per_head // Q_HEADS
    h = tl.program_id(0) // tiles_per_head % Q_HEADS
    q_start = row_tile * BLOCK_M
    q_idx = q_start + tl.arange(0, BLOCK_M)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    query_ptr += batch * query_stride_b + head * query_stride_h
    grad_output_ptr += batch * grad_output_stride_b + head * grad_output_stride_h
    key_ptr += batch * key_stride_b + (head // GQA_SHARED_HEADS) * key_stride_h
    value_ptr += batch * value_stride_b + (head // GQA_SHARED_HEADS) * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])
    grad_output = tl.load(grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :])
    aux_offset = (batch * Q_HEADS + head) * Q_LEN + q_idx
    row_shift = tl.load(row_shift_ptr + aux_offset)
    row_tail = tl.load(logsumexp_tail_ptr + aux_offset)
    delta = tl.load(delta_ptr + aux_offset)

    grad_query = tl.zeros([BLOCK_M, QK_HEAD_DIM_ROUNDED], tl.float32)
    q_lo = q_start
    q_hi = q_start + BLOCK_M - 1
    # [0, q_idx + 1)
    lo = 0
    hi = tl.cdiv(tl.minimum(q_hi + 1, KV_LEN), BLOCK_N)
    full_hi = tl.minimum(q_lo + 1, KV_LEN) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, row_tail, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h,
        q_idx,
        bias_ptr, bias_stride0, bias_size0, bias_size1,
        lo, full_hi, False,
    )
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, row_tail, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h,
        q_idx,
        bias_ptr, bias_stride0, bias_size0, bias_size1,
        full_hi, hi, True,
    )

    grad_query = grad_query * SM_SCALE
    grad_query_ptr += batch * grad_query_stride_b + head * grad_query_stride_h
    tl.store(
        grad_query_ptr + q_idx[:, None] * grad_query_stride_q + qk_dim[None, :],
        grad_query.to(grad_query_ptr.dtype.element_ty),
    )
