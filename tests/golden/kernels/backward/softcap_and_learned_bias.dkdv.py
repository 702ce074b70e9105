"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    softcap
mask_mod     causal_mask
tile         32 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
queries      closed form: mask is an interval in q_idx: [kv_idx, Q_LEN)
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=False, FAST_TANH=True,
                 LONG_ROWS_FIRST=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(32)
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
def contribution_bias(score, grad, b, h, q_idx, kv_idx):
    """What each (query, key) pair adds to the gradient of bias."""
    return grad


@triton.jit
def scatter_bias(
    value, exists, b, h, q_idx, kv_idx, grad_bias_ptr, grad_bias_stride0, grad_bias_stride1, bias_size0,
    bias_size1,
):
    """Add values to the gradient of bias; many may meet in one element."""
    tl.atomic_add(
        grad_bias_ptr + h * grad_bias_stride0 + kv_idx * grad_bias_stride1, value,
        mask=exists & (h < bias_size0) & (kv_idx < bias_size1),
        sem="relaxed",
    )


@triton.jit
def accumulate(
    grad_key, grad_value, grad_bias, key, value,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, logsumexp_tail_ptr,
    delta_ptr, b,
    h, kv_idx,
    bias_ptr, bias_stride0, bias_size0, bias_size1, grad_bias_ptr,
    grad_bias_stride0, grad_bias_stride1,
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
        query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])
        row_shift = tl.load(row_shift_ptr + q_idx)
        row_tail = tl.load(logsumexp_tail_ptr + q_idx)
        delta = tl.load(delta_ptr + q_idx)
        score = tl.dot(key, query.T)
        score = score * SM_SCALE
        modified = score_mod(
            score, b, h, q_idx[None, :], kv_idx[:, None], bias_ptr, bias_stride0, bias_size0, bias_size1,
        )
        weight = tl.exp2((modified - row_shift[None, :] - row_tail[None, :]) * LOG2_E)
        if CHECKED:
            live = mask_mod(b, h, q_idx[None, :], kv_idx[:, None])
            weight = tl.where(live, weight, 0.0)
        grad_output = tl.load(grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :])
        grad_value = tl.dot(weight.to(grad_output.dtype), grad_output, grad_value)
        grad_weight = tl.dot(value, grad_output.T)
        grad_score = weight * (grad_weight - delta[None, :])
        share_of_bias = contribution_bias(score, grad_score, b, h, q_idx[None, :], kv_idx[:, None])
        if CHECKED:
            share_of_bias = tl.where(live, share_of_bias, 0.0)
        grad_bias += tl.sum(share_of_bias, 1)
        grad_score = score_grad(score, grad_score, b, h, q_idx[None, :], kv_idx[:, None])
        if CHECKED:
            grad_score = tl.where(live, grad_score, 0.0)
        grad_key = tl.dot(grad_score.to(query.dtype), query, grad_key)
    return grad_key, grad_value, grad_bias


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
    bias_ptr,
    bias_stride0,
    bias_size0,
    bias_size1,
    grad_bias_ptr,
    grad_bias_stride0,
    grad_bias_stride1,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_key and grad_value.
    tiles_per_head = tl.cdiv(KV_LEN, BLOCK_N)
    kv_tile = tl.program_id(0) % tiles_per_head
    kv_heads = Q_HEADS // GQA_SHARED_HEADS
    b = tl.program_id(0) // tiles_per_head // kv_heads
    kv_head = tl.program_id(0) // tiles_per_head % kv_heads
    kv_start = kv_tile * BLOCK_N
    kv_idx = kv_start + tl.arange(0, BLOCK_N)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    key_ptr += batch * key_stride_b + wide_kv_head * key_stride_h
    value_ptr += batch * value_stride_b + wide_kv_head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
    value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])

    grad_key = tl.zeros([BLOCK_N, QK_HEAD_DIM_ROUNDED], tl.float32)
    grad_value = tl.zeros([BLOCK_N, V_HEAD_DIM_ROUNDED], tl.float32)
    for shared_head in tl.range(0, GQA_SHARED_HEADS):
        h = kv_head * GQA_SHARED_HEADS + shared_head
        head = h.to(tl.int64)
        head_query_ptr = query_ptr + batch * query_stride_b + head * query_stride_h
        head_grad_output_ptr = grad_output_ptr + batch * grad_output_stride_b + head * grad_output_stride_h
        aux_offset = (batch * Q_HEADS + head) * Q_LEN
        grad_bias = tl.full([BLOCK_N], 0.0, tl.float32)
        kv_lo = kv_start
        kv_hi = kv_start + BLOCK_N - 1
        # [kv_idx, Q_LEN)
        lo = tl.minimum(kv_lo, Q_LEN) // BLOCK_M
        hi = tl.cdiv(Q_LEN, BLOCK_M)
        full_lo = tl.cdiv(tl.minimum(kv_hi, Q_LEN), BLOCK_M)
        full_hi = Q_LEN // BLOCK_M
        full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
        full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
        grad_key, grad_value, grad_bias = accumulate(
            grad_key, grad_value, grad_bias, key, value,
            head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
            row_shift_ptr + aux_offset, logsumexp_tail_ptr + aux_offset,
            delta_ptr + aux_offset, b, h, kv_idx,
            bias_ptr, bias_stride0, bias_size0, bias_size1, grad_bias_ptr,
            grad_bias_stride0, grad_bias_stride1,
            full_lo, full_hi, full_hi, 0, False,
        )
        grad_key, grad_value, grad_bias = accumulate(
            grad_key, grad_value, grad_bias, key, value,
            head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
            row_shift_ptr + aux_offset, logsumexp_tail_ptr + aux_offset,
            delta_ptr + aux_offset, b, h, kv_idx,
            bias_ptr, bias_stride0, bias_size0, bias_size1, grad_bias_ptr,
            grad_bias_stride0, grad_bias_stride1,
            lo, hi, full_lo, full_hi - full_lo, True,
        )
        scatter_bias(
            grad_bias, tl.full([BLOCK_N], True, tl.int1), b, h, 0, kv_idx, grad_bias_ptr, grad_bias_stride0,
            grad_bias_stride1, bias_size0, bias_size1,
        )

    grad_key = grad_key * SM_SCALE
    grad_key_ptr += batch * grad_key_stride_b + wide_kv_head * grad_key_stride_h
    tl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + qk_dim[None, :],
        grad_key.to(grad_key_ptr.dtype.element_ty),
    )

    grad_value_ptr += batch * grad_value_stride_b + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
    )
