"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200; not measured with
                 dropout
queries      closed form: mask is an interval in q_idx: [kv_idx, Q_LEN)
dropout      grouped   because: dropout_p is not 0: one call of the generator draws four pairs, 8 queries and
                 8 keys apart
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
def dropout_stream(seed_ptr, b, h):
    """The four words that a head's draws start from: Philox4x32-10 keyed by the seed, at (offset, b, h).

    Philox permutes its counters, so other heads, and other offsets, have other words.
    """
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, b.to(tl.uint32), h.to(tl.uint32))


@triton.jit
def is_kept(stream, drop_below, q_start, kv_start):
    """Which pairs of a tile [BLOCK_N, BLOCK_M] keep their weight: those that draw a word of at least drop_below.

    One call of Philox4x32-10 draws for two queries and two keys, each 8 apart: on matrix units up to sm_90, pairs of
    one thread. Its key is two words of the head's stream; its counter is kv_idx and q_idx, both without their bit 3,
    and the other two words. Bit 3 of kv_idx, and bit 3 of q_idx times two, say which word of the result is a pair's.
    """
    key_0, key_1, word_2, word_3 = stream
    # Tiles start at multiples of 16, so that leaving out bit 3 numbers the groups without a gap.
    q_group = q_start // 2 + tl.arange(0, BLOCK_M // 2)
    kv_group = kv_start // 2 + tl.arange(0, BLOCK_N // 2)
    q_0_kv_0, q_0_kv_8, q_8_kv_0, q_8_kv_8 = tl.philox_impl(
        kv_group[:, None].to(tl.uint32), q_group[None, :].to(tl.uint32), word_2, word_3, key_0, key_1
    )
    kv_0 = tl.join(q_0_kv_0 >= drop_below, q_8_kv_0 >= drop_below)
    kv_8 = tl.join(q_0_kv_8 >= drop_below, q_8_kv_8 >= drop_below)
    kept = tl.join(kv_0, kv_8)  # [groups of keys, groups of queries, bit 3 of q_idx, bit 3 of kv_idx]
    # Put both bits back into their places.
    kept = tl.reshape(kept, [BLOCK_N // 16, 8, BLOCK_M // 16, 8, 2, 2])
    return tl.reshape(tl.permute(kept, (0, 5, 1, 2, 4, 3)), [BLOCK_N, BLOCK_M])


@triton.jit
def accumulate(
    grad_key, grad_value, key, value,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, delta_ptr, b, h,
    kv_idx, stream, drop_below, kv_start, keep_scale,
    first, last, gap_0, width_0, CHECKED: tl.constexpr,
):
    """Add to grad_key and grad_value what query tiles first to last - 1, but for gaps, contribute.

    Tiles of scores are transposed here: [BLOCK_N keys, BLOCK_M queries].

    With s = keep_scale, the output is the sum of kept * s * weight * value over keys, and the gradient of a weight
    kept * s * (grad_output . value). The sum of weight times its gradient is grad_output . output, as it is without
    dropout: delta needs no change.
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for step in tl.range(first, last - width_0):
        tile = step + tl.where(step >= gap_0, width_0, 0)
        q_start = tile * BLOCK_M
        q_idx = q_start + tl.arange(0, BLOCK_M)
        query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])
        row_shift = tl.load(row_shift_ptr + q_idx) * LOG2_E
        delta = tl.load(delta_ptr + q_idx)
        score = tl.dot(key, query.T)
        weight = tl.exp2(score * SCALE_LOG2_E - row_shift[None, :])
        if CHECKED:
            live = mask_mod(b, h, q_idx[None, :], kv_idx[:, None])
            weight = tl.where(live, weight, 0.0)
        grad_output = tl.load(grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :])
        kept = is_kept(stream, drop_below, q_start, kv_start)
        grad_value = tl.dot(tl.where(kept, weight, 0.0).to(grad_output.dtype), grad_output, grad_value)
        grad_weight = tl.dot(value, grad_output.T)
        grad_weight = tl.where(kept, grad_weight, 0.0) * keep_scale
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
    dropout_seed_ptr,
    drop_below,
    keep_scale,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_key and grad_value.
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
    value_ptr += batch * value_stride_b + wide_kv_head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
    value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])

    grad_key = tl.zeros([BLOCK_N, QK_HEAD_DIM_ROUNDED], tl.float32)
    grad_value = tl.zeros([BLOCK_N, V_HEAD_DIM_ROUNDED], tl.float32)
    h = kv_head
    head = h.to(tl.int64)
    head_query_ptr = query_ptr + batch * query_stride_b + head * query_stride_h
    head_grad_output_ptr = grad_output_ptr + batch * grad_output_stride_b + head * grad_output_stride_h
    aux_offset = (batch * Q_HEADS + head) * Q_LEN
    stream = dropout_stream(dropout_seed_ptr, b, h)
    kv_lo = kv_start
    kv_hi = kv_start + BLOCK_N - 1
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
        b, h, kv_idx, stream, drop_below, kv_start,
        keep_scale,
        full_lo, full_hi, full_hi, 0, False,
    )
    grad_key, grad_value = accumulate(
        grad_key, grad_value, key, value,
        head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
        row_shift_ptr + aux_offset, delta_ptr + aux_offset,
        b, h, kv_idx, stream, drop_below, kv_start,
        keep_scale,
        lo, hi, full_lo, full_hi - full_lo, True,
    )

    grad_key = grad_key * SM_SCALE
    grad_key_ptr += batch * grad_key_stride_b + wide_kv_head * grad_key_stride_h
    tl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + qk_dim[None, :],
        grad_key.to(grad_key_ptr.dtype.element_ty),
    )

    grad_value = grad_value * keep_scale
    grad_value_ptr += batch * grad_value_stride_b + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
    )
