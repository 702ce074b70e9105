"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_mask
tile         64 query rows x 64 keys, 4 warps, 5 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200); pages are looked up a step before keys are fetched
keys         closed form: mask is an interval in kv_idx: [0, q_idx + 1)
rows safe    no   because: kv_lengths may leave a batch row without keys
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
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
PAGE_SIZE = tl.constexpr(128)  # keys of a page
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
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
    key_ptr, key_stride_kv, key_stride_page, value_ptr, value_stride_kv, value_stride_page, kv_len,
    page_table_ptr,
    b, h, q_idx,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        column_exists = kv_idx < kv_len
        page = tl.load(page_table_ptr + kv_start // PAGE_SIZE).to(tl.int64)
        in_page = kv_start % PAGE_SIZE + tl.arange(0, BLOCK_N)
        if CHECKED:
            key = tl.load(
                key_ptr + page * key_stride_page + in_page[:, None] * key_stride_kv + qk_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            key = tl.load(
                key_ptr + page * key_stride_page + in_page[:, None] * key_stride_kv + qk_dim[None, :],
            )
        score = tl.dot(query, key.T)
        if CHECKED:
            score = tl.where(
                column_exists[None, :] & mask_mod(b, h, q_idx[:, None], kv_idx[None, :]), score,
                float("-inf"),
            )

        # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp2((row_max - new_max) * SCALE_LOG2_E)
        weight = tl.exp2(score * SCALE_LOG2_E - (new_max * SCALE_LOG2_E)[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max

        acc = rescale(acc, alpha)
        if CHECKED:
            value = tl.load(
                value_ptr + page * value_stride_page + in_page[:, None] * value_stride_kv + v_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            value = tl.load(
                value_ptr + page * value_stride_page + in_page[:, None] * value_stride_kv + v_dim[None, :],
            )
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    kv_lengths_ptr,
    kv_lengths_stride_b,
    page_table_ptr,
    page_table_stride_b,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_page,
    key_stride_h,
    key_stride_kv,
    value_stride_page,
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
    row_exists = q_idx < Q_LEN
    # The batch row's own number of keys; those of KV_LEN that lie past it do not exist.
    kv_len = tl.load(kv_lengths_ptr + b * kv_lengths_stride_b)
    kv_len = tl.minimum(tl.maximum(kv_len, 0), KV_LEN).to(tl.int32)

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    key_ptr += head * key_stride_h
    value_ptr += head * value_stride_h
    page_table_ptr += batch * page_table_stride_b
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    query_ptr += batch * query_stride_b + head * query_stride_h
    query = tl.load(
        query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )

    acc = tl.zeros([BLOCK_M, V_HEAD_DIM_ROUNDED], tl.float32)
    row_max = tl.full([BLOCK_M], ROW_MAX_FLOOR, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    q_lo = q_start
    q_hi = tl.minimum(q_start + BLOCK_M, Q_LEN) - 1
    # [0, q_idx + 1)
    lo = 0
    hi = tl.cdiv(tl.minimum(q_hi + 1, kv_len), BLOCK_N)
    full_hi = tl.minimum(q_lo + 1, kv_len) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, key_stride_page, value_ptr, value_stride_kv, value_stride_page, kv_len,
        page_table_ptr,
        b, h, q_idx,
        lo, full_hi, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, key_stride_page, value_ptr, value_stride_kv, value_stride_page, kv_len,
        page_table_ptr,
        b, h, q_idx,
        full_hi, hi, True,
    )

    # A row without a live key has row_sum 0: its output is 0.
    row_is_empty = row_sum == 0.0
    output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )
