"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     document_mask
tile         64 query rows x 64 keys, 4 warps, 3 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200)
keys         row reduced: mask is an interval in kv_idx: [offsets[document_of[q_idx]],
                 offsets[document_of[q_idx] + 1])
rows safe    no   because: no key was found that is live for every query
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=False, OUTPUT_MAX=False,
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
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, document_of_ptr, document_of_size0, offsets_size0, offsets_ptr):
    """document_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # document = document_of[q_idx]
    document = tl.load(document_of_ptr + q_idx, mask=q_idx < document_of_size0, other=0)
    # return (offsets[document] <= kv_idx) & (kv_idx < offsets[document + 1])
    offsets_index = tl.where(document < 0, document.to(tl.int64) + offsets_size0, document)
    offsets_at_q = tl.load(
        offsets_ptr + offsets_index,
        mask=(offsets_index >= 0) & (offsets_index < offsets_size0),
        other=0,
    )
    converted = document + 1
    chosen = tl.where(converted < 0, converted.to(tl.int64) + offsets_size0, converted)
    offsets_at_q_2 = tl.load(offsets_ptr + chosen, mask=(chosen >= 0) & (chosen < offsets_size0), other=0)
    return (offsets_at_q <= kv_idx) & (kv_idx < offsets_at_q_2)


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
    document_of_ptr, document_of_size0, offsets_size0, offsets_ptr,
    first, last, gap_0, width_0, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1.

    Of each gap, `width` tiles from `gap` on, nothing is visited.
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for step in tl.range(first, last - width_0):
        tile = step + tl.where(step >= gap_0, width_0, 0)
        kv_start = tile * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        score = tl.dot(query, key.T)
        if CHECKED:
            score = tl.where(
                mask_mod(
                    b, h, q_idx[:, None], kv_idx[None, :], document_of_ptr, document_of_size0, offsets_size0,
                    offsets_ptr,
                ),
                score, float("-inf"),
            )

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
    document_of_ptr,
    document_of_size0,
    offsets_size0,
    offsets_ptr,
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

    # [offsets[document_of[q_idx]], offsets[document_of[q_idx] + 1])
    document_of_at_q = tl.load(document_of_ptr + q_idx, mask=q_idx < document_of_size0, other=0)
    chosen = tl.where(document_of_at_q < 0, document_of_at_q.to(tl.int64) + offsets_size0, document_of_at_q)
    offsets_at_q = tl.load(offsets_ptr + chosen, mask=(chosen >= 0) & (chosen < offsets_size0), other=0)
    lo = tl.minimum(tl.maximum(tl.min(offsets_at_q, 0), 0), KV_LEN) // BLOCK_N
    converted = document_of_at_q + 1
    chosen_2 = tl.where(converted < 0, converted.to(tl.int64) + offsets_size0, converted)
    offsets_at_q_2 = tl.load(
        offsets_ptr + chosen_2,
        mask=(chosen_2 >= 0) & (chosen_2 < offsets_size0),
        other=0,
    )
    hi = tl.cdiv(tl.minimum(tl.maximum(tl.max(offsets_at_q_2, 0), 0), KV_LEN), BLOCK_N)
    full_lo = tl.cdiv(tl.minimum(tl.maximum(tl.max(offsets_at_q, 0), 0), KV_LEN), BLOCK_N)
    full_hi = tl.minimum(tl.maximum(tl.min(offsets_at_q_2, 0), 0), KV_LEN) // BLOCK_N
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
        document_of_ptr, document_of_size0, offsets_size0, offsets_ptr,
        full_lo, full_hi, full_hi, 0, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
        document_of_ptr, document_of_size0, offsets_size0, offsets_ptr,
        lo, hi, full_lo, full_hi - full_lo, True,
    )

    # A row without a live key has row_sum 0: its output is 0.
    row_is_empty = row_sum == 0.0
    output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += batch * output_stride_b + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
    )
