"""Fused attention, backward, dQ, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     document_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
keys         blocks as its tiles, listed on the device: (document_id[q_idx] == document_id[kv_idx]) is not
                 solved for kv_idx: it loads document_id at an index that depends on kv_idx; live keys lie in
                 [0, q_idx + 1)
flags        IS_DIVISIBLE=False, SAFE_HEAD_DIM=True, HAS_FULL_BLOCKS=True, FAST_TANH=False,
                 LONG_ROWS_FIRST=False
"""

import triton
import triton.language as tl

# Template variables; docs/options.md says what each one means.
BLOCK_M = tl.constexpr(64)
BLOCK_N = tl.constexpr(64)
QK_HEAD_DIM_ROUNDED = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)
GQA_SHARED_HEADS = tl.constexpr(2)
SPARSE_Q_BLOCK_SIZE = tl.constexpr(64)
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
LOG2_E = tl.constexpr(1.4426950408889634)  # weights are computed in base 2


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, document_id_ptr, document_id_size0):
    """document_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return (document_id[q_idx] == document_id[kv_idx]) & (q_idx >= kv_idx)
    document_id_at_q = tl.load(document_id_ptr + q_idx, mask=q_idx < document_id_size0, other=0)
    document_id_at_kv = tl.load(document_id_ptr + kv_idx, mask=kv_idx < document_id_size0, other=0)
    return (document_id_at_q == document_id_at_kv) & (q_idx >= kv_idx)


@triton.jit
def accumulate(
    grad_query, query, grad_output, row_shift, delta,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b, h, q_idx,
    document_id_ptr, document_id_size0,
    indices_ptr,
    first, last, CHECKED: tl.constexpr,
):
    """Add to grad_query what key tiles first to last - 1 of a block list contribute."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    # A block's index is read a step ahead: copies of its tiles then wait for nothing but its number.
    next_block = tl.load(indices_ptr + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        kv_start = next_block * BLOCK_N
        next_block = tl.load(indices_ptr + tile + 1, mask=tile + 1 < last, other=0)
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        column_exists = kv_idx < KV_LEN
        key = tl.load(
            key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :],
            mask=column_exists[:, None],
            other=0.0,
        )
        score = tl.dot(query, key.T)
        weight = tl.exp2(score * SCALE_LOG2_E - row_shift[:, None])
        if CHECKED:
            live = column_exists[None, :] & mask_mod(
                b, h, q_idx[:, None], kv_idx[None, :], document_id_ptr, document_id_size0,
            )
            weight = tl.where(live, weight, 0.0)
        else:
            weight = tl.where(column_exists[None, :], weight, 0.0)
        value = tl.load(
            value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
            mask=column_exists[:, None],
            other=0.0,
        )
        grad_weight = tl.dot(grad_output, value.T)
        grad_score = weight * (grad_weight - delta[:, None])
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
    delta_ptr,
    kv_num_blocks_ptr,
    full_kv_num_blocks_ptr,
    kv_offsets_ptr,
    kv_indices_ptr,
    kv_num_blocks_stride_b,
    kv_num_blocks_stride_h,
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
    document_id_ptr,
    document_id_size0,
):
    # One program computes the gradient of BLOCK_M queries of one query head.
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
    query_ptr += batch * query_stride_b + head * query_stride_h
    grad_output_ptr += batch * grad_output_stride_b + head * grad_output_stride_h
    key_ptr += batch * key_stride_b + (head // GQA_SHARED_HEADS) * key_stride_h
    value_ptr += batch * value_stride_b + (head // GQA_SHARED_HEADS) * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    query = tl.load(
        query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    grad_output = tl.load(
        grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    aux_offset = (batch * Q_HEADS + head) * Q_LEN + q_idx
    row_shift = tl.load(row_shift_ptr + aux_offset, mask=row_exists, other=float("inf")) * LOG2_E
    delta = tl.load(delta_ptr + aux_offset, mask=row_exists, other=0.0)

    grad_query = tl.zeros([BLOCK_M, QK_HEAD_DIM_ROUNDED], tl.float32)
    # The blocks listed for this row of blocks, those that need the mask first; a mask dimension of
    # size 1 has stride 0.
    own_block = q_start // SPARSE_Q_BLOCK_SIZE
    line_of_blocks = batch * kv_num_blocks_stride_b + h * kv_num_blocks_stride_h + own_block
    listed = tl.load(kv_offsets_ptr + line_of_blocks)
    last = tl.load(kv_num_blocks_ptr + line_of_blocks)
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx,
        document_id_ptr, document_id_size0,
        kv_indices_ptr + listed,
        0, last, True,
    )

    # Full blocks need no mask.
    listed += last
    last = tl.load(full_kv_num_blocks_ptr + line_of_blocks)
    grad_query = accumulate(
        grad_query, query, grad_output, row_shift, delta,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, KV_LEN, b,
        h, q_idx,
        document_id_ptr, document_id_size0,
        kv_indices_ptr + listed,
        0, last, False,
    )

    grad_query = grad_query * SM_SCALE
    grad_query_ptr += batch * grad_query_stride_b + head * grad_query_stride_h
    tl.store(
        grad_query_ptr + q_idx[:, None] * grad_query_stride_q + qk_dim[None, :],
        grad_query.to(grad_query_ptr.dtype.element_ty),
        mask=row_exists[:, None],
    )
