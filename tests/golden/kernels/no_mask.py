"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     none: every key is live
tile         128 query rows x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
keys         no mask: there is no mask
rows safe    yes   because: there is no mask
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=True,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=False, OUTPUT_MAX=False,
                 OUTPUT_TAIL=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(128)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv,
    first, last,
):
    """Take one step of the online softmax for each key tile from first to last - 1."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        score = tl.dot(query, key.T)

        # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp2((row_max - new_max) * SCALE_LOG2_E)
        weight = tl.exp2(score * SCALE_LOG2_E - (new_max * SCALE_LOG2_E)[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max

        acc = rescale(acc, alpha)
        value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
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
    row_tile = tl.program_id(0) % tiles_per_head
    b = tl.program_id(0) // tiles_per_head // Q_HEADS
    h = tl.program_id(0) // tiles_per_head % Q_HEADS
    q_start = row_tile * BLOCK_M
    q_idx = q_start + tl.arange(0, BLOCK_M)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    key_ptr += batch * key_stride_b + head * key_stride_h
    value_ptr += batch * value_stride_b + head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    query_ptr += batch * query_stride_b + head * query_stride_h
    query = tl.load(query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :])

    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_ROUNDED], tl.float32)
    row_max = tl.full([BLOCK_M], ROW_MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # there is no mask
    lo = 0
    hi = tl.cdiv(KV_LEN, BLOCK_N)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv,
        lo, hi,
    )

    output = acc / row_sum[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
    )
