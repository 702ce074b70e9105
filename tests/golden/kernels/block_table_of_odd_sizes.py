"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal_mask
tile         16 query rows x 32 keys, 4 warps, 3 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200)
keys         the block mask's lists say which blocks are visited
rows safe    no   because: a block table may leave rows without a block
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=True, USE_TMA=False, USE_SUBTILING=False,
                 FAST_TANH=False, LONG_ROWS_FIRST=False, OUTPUT_LOGSUMEXP=False, OUTPUT_MAX=False,
                 OUTPUT_TAIL=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(16)
BLOCK_N = tl.constexpr(32)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
SPARSE_Q_BLOCK_SIZE = tl.constexpr(48)
SPARSE_KV_BLOCK_SIZE = tl.constexpr(96)
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
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    kv_indices_ptr, tiles_per_block,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1 of a block list."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        listed = tile // tiles_per_block
        block = tl.load(kv_indices_ptr + listed)
        kv_start = block * SPARSE_KV_BLOCK_SIZE + (tile - listed * tiles_per_block) * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        column_exists = kv_idx < KV_LEN
        key = tl.load(
            key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :],
            mask=column_exists[:, None],
            other=0.0,
        )
        score = tl.dot(query, key.T)
        if CHECKED:
            score = tl.where(
                column_exists[None, :] & mask_mod(b, h, q_idx[:, None], kv_idx[None, :]), score,
                float("-inf"),
            )
        else:
            score = tl.where(column_exists[None, :], score, float("-inf"))

        # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp2((row_max - new_max) * SCALE_LOG2_E)
        weight = tl.exp2(score * SCALE_LOG2_E - (new_max * SCALE_LOG2_E)[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        row_max = new_max

        acc = rescale(acc, alpha)
        value = tl.load(
            value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
            mask=column_exists[:, None],
            other=0.0,
        )
        acc = tl.dot(weight.to(value.dtype), value, acc)
    return acc, row_max, row_sum


@triton.jit
def forward(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    full_kv_num_blocks_ptr,
    full_kv_indices_ptr,
    kv_num_blocks_stride_b,
    kv_num_blocks_stride_h,
    kv_num_blocks_stride_q,
    kv_indices_stride_b,
    kv_indices_stride_h,
    kv_indices_stride_q,
    full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h,
    full_kv_num_blocks_stride_q,
    full_kv_indices_stride_b,
    full_kv_indices_stride_h,
    full_kv_indices_stride_q,
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
    row_exists = q_idx < Q_LEN

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    head = h.to(tl.int64)
    key_ptr += batch * key_stride_b + head * key_stride_h
    value_ptr += batch * value_stride_b + head * value_stride_h
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

    # The key blocks listed for this row of blocks; a mask dimension of size 1 has stride 0.
    q_block = q_start // SPARSE_Q_BLOCK_SIZE
    tiles_per_block = tl.cdiv(tl.minimum(SPARSE_KV_BLOCK_SIZE, KV_LEN), BLOCK_N)
    row_of_blocks = batch * kv_num_blocks_stride_b + h * kv_num_blocks_stride_h + q_block * kv_num_blocks_stride_q
    listed = batch * kv_indices_stride_b + h * kv_indices_stride_h + q_block * kv_indices_stride_q
    last = tl.load(kv_num_blocks_ptr + row_of_blocks) * tiles_per_block
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        kv_indices_ptr + listed, tiles_per_block,
        0, last, True,
    )

    # Full blocks need no mask.
    row_of_blocks = (
        batch * full_kv_num_blocks_stride_b + h * full_kv_num_blocks_stride_h + q_block * full_kv_num_blocks_stride_q
    )
    listed = batch * full_kv_indices_stride_b + h * full_kv_indices_stride_h + q_block * full_kv_indices_stride_q
    last = tl.load(full_kv_num_blocks_ptr + row_of_blocks) * tiles_per_block
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
        full_kv_indices_ptr + listed, tiles_per_block,
        0, last, False,
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
