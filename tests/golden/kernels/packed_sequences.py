"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_after_a_prefix
tile         64 query rows x 64 keys, 4 warps, 3 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200)
sequences    packed: a tile searches its sequence: one load for up to 128, less than a map's own launch costs
keys         closed form: mask is an interval in kv_idx: [0, q_idx + prefix_length[b] + 1)
rows safe    no   because: a packed sequence may have queries and no keys; the device alone knows
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=False, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=True, OUTPUT_MAX=False,
                 OUTPUT_TAIL=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
GQA_SHARED_HEADS = tl.constexpr(2)
SEARCH_WIDTH = tl.constexpr(128)  # sequences that a tile compares at a time
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, prefix_length_ptr, prefix_length_size0):
    """causal_after_a_prefix: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx + prefix_length[b] >= kv_idx
    prefix_length_at_b = tl.load(prefix_length_ptr + b, mask=b < prefix_length_size0, other=0)
    return q_idx.to(tl.int64) + prefix_length_at_b >= kv_idx


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
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    prefix_length_ptr, prefix_length_size0,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1."""
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
        if CHECKED:
            score = tl.where(
                column_exists[None, :] & mask_mod(
                    b, h, q_idx[:, None], kv_idx[None, :], prefix_length_ptr, prefix_length_size0,
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
        if CHECKED:
            value = tl.load(
                value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
                mask=column_exists[:, None],
                other=0.0,
            )
        else:
            value = tl.load(value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :])
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    logsumexp_ptr,
    query_stride_h,
    query_stride_q,
    key_stride_h,
    key_stride_kv,
    value_stride_h,
    value_stride_kv,
    output_stride_h,
    output_stride_q,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    Q_TOTAL,
    SEQUENCES,
    Q_HEADS,
    prefix_length_ptr,
    prefix_length_size0,
):
    # One program computes BLOCK_M query rows of one query head of one sequence.
    h = tl.program_id(0) % Q_HEADS
    row_tile = tl.program_id(0) // Q_HEADS
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
    key_ptr += kv_base * key_stride_kv + (head // GQA_SHARED_HEADS) * key_stride_h
    value_ptr += kv_base * value_stride_kv + (head // GQA_SHARED_HEADS) * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    query_ptr += q_base * query_stride_q + head * query_stride_h
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
    # [0, q_idx + prefix_length[b] + 1)
    lo = 0
    prefix_length_at_b = tl.load(prefix_length_ptr + b, mask=b < prefix_length_size0, other=0)
    hi = tl.cdiv(
        tl.minimum(tl.maximum(q_hi.to(tl.int64) + prefix_length_at_b + 1, 0), KV_LEN).to(tl.int32), BLOCK_N,
    )
    full_hi = tl.minimum(
        tl.maximum(q_lo.to(tl.int64) + prefix_length_at_b + 1, 0), KV_LEN,
    ).to(tl.int32) // BLOCK_N
    full_hi = tl.minimum(tl.maximum(full_hi, lo), hi)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        prefix_length_ptr, prefix_length_size0,
        lo, full_hi, False,
    )
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        prefix_length_ptr, prefix_length_size0,
        full_hi, hi, True,
    )

    # A row without a live key has row_sum 0: its output is 0, its logsumexp and maximum -inf.
    row_is_empty = row_sum == 0.0
    output = acc / tl.where(row_is_empty, 1.0, row_sum)[:, None]
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    output_ptr += q_base * output_stride_q + head * output_stride_h
    tl.store(
        output_ptr + q_idx[:, None] * output_stride_q + v_dim[None, :],
        output.to(output_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )
    aux_offset = head * Q_TOTAL + q_base + q_idx
    natural_max = row_max * SM_SCALE
    log_sum = tl.log(tl.where(row_is_empty, 1.0, row_sum))
    logsumexp = natural_max + log_sum
    logsumexp = tl.where(row_is_empty, float("-inf"), logsumexp)
    tl.store(logsumexp_ptr + aux_offset, logsumexp, mask=row_exists)
