"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_mask
tile         64 query rows x 64 keys, 4 warps, 3 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200)
keys         closed form: mask is an interval in kv_idx: [0, q_idx + 1)
rows safe    yes   because: kv_idx == 0 always passes the mask, given 1 <= KV_LEN
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=True,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=True, OUTPUT_LOGSUMEXP=False, OUTPUT_MAX=False,
                 OUTPUT_TAIL=False
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
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled


@triton.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, score_scale, b, h, q_idx,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        key = key.to(query.dtype)
        score = tl.dot(query, key.T)
        score = score * score_scale
        if CHECKED:
            score = tl.where(mask_mod(b, h, q_idx[:, None], kv_idx[None, :]), score, float("-inf"))

        # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp2((row_max - new_max) * LOG2_E)
        weight = tl.exp2(score * LOG2_E - (new_max * LOG2_E)[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max

        acc = rescale(acc, alpha)
        value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        value = value.to(query.dtype)
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    k_scale_ptr,
    k_scale_stride_h,
    v_scale_ptr,
    v_scale_stride_h,
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
    # One program computes BLOCK_M query rows of one query head.
    tiles_per_head = tl.cdiv(Q_LEN, BLOCK_M)
    row_tile = tiles_per_head - 1 - tl.program_id(0) % tiles_per_head  # the longest rows start first
    b = tl.program_id(0) // tiles_per_head // Q_HEADS
    h = tl.program_id(0) // tiles_per_head % Q_HEADS
    q_start = row_tile * BLOCK_M
    q_idx = q_start + tl.arange(0, BLOCK_M)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    key_ptr += batch * key_stride_b + head * key_stride_h
    value_ptr += batch * value_stride_b + head * value_stride_h
    score_scale = SM_SCALE * tl.load(k_scale_ptr + head * k_scale_stride_h)
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    query_ptr += batch * query_stride_b + head * query_stride_h
    query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])

    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_ROUNDED], tl.float32)
    row_max = tl.full([BLOCK_M], ROW_MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    q_lo = q_start
    q_hi = q_start + BLOCK_M - 1
    # [0, q_idx + 1)
    lo = 0
    hi = tl.cdiv(tl.minimum(q_hi + 1, KV_LEN), BLOCK_N)
    full_hi = tl.minimum(q_lo + 1, KV_LEN) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, score_scale, b, h, q_idx,
        lo, full_hi, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, score_scale, b, h, q_idx,
        full_hi, hi, True,
    )
    acc = acc * tl.load(v_scale_ptr + head * v_scale_stride_h)

    output = acc / row_sum[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
    )
