"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     document_mask
tile         64 queries x 64 keys, 4 warps, 3 stages   because: fits; measured on H200
queries      blocks as its tiles, listed on the device: (document_id[q_idx] == document_id[kv_idx]) is not
                 solved for q_idx: it loads document_id at an index that depends on q_idx; live keys lie in
                 [kv_idx, Q_LEN)
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
SPARSE_KV_BLOCK_SIZE = tl.constexpr(64)
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
    grad_key, grad_value, key, value,
    query_ptr, query_stride_q, grad_output_ptr, grad_output_stride_q, row_shift_ptr, delta_ptr, Q_LEN, b,
    h, kv_idx,
    document_id_ptr, document_id_size0,
    indices_ptr,
    first, last, CHECKED: tl.constexpr,
):
    """Add to grad_key and grad_value what query tiles first to last - 1 of a block list contribute.

    Tiles of scores are transposed here: [BLOCK_N keys, BLOCK_M queries].
    """
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    # A block's index is read a step ahead: copies of its tiles then wait for nothing but its number.
    next_block = tl.load(indices_ptr + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        q_start = next_block * BLOCK_M
        next_block = tl.load(indices_ptr + tile + 1, mask=tile + 1 < last, other=0)
        q_idx = q_start + tl.arange(0, BLOCK_M)
        row_exists = q_idx < Q_LEN
        query = tl.load(
            query_ptr + q_idx[:, None] * query_stride_q + qk_dim[None, :],
            mask=row_exists[:, None],
            other=0.0,
        )
        row_shift = tl.load(row_shift_ptr + q_idx, mask=row_exists, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + q_idx, mask=row_exists, other=0.0)
        score = tl.dot(key, query.T)
        weight = tl.exp2(score * SCALE_LOG2_E - row_shift[None, :])
        if CHECKED:
            live = row_exists[None, :] & mask_mod(
                b, h, q_idx[None, :], kv_idx[:, None], document_id_ptr, document_id_size0,
            )
            weight = tl.where(live, weight, 0.0)
        else:
            weight = tl.where(row_exists[None, :], weight, 0.0)
        grad_output = tl.load(
            grad_output_ptr + q_idx[:, None] * grad_output_stride_q + v_dim[None, :],
            mask=row_exists[:, None],
            other=0.0,
        )
        grad_value = tl.dot(weight.to(grad_output.dtype), grad_output, grad_value)
        grad_weight = tl.dot(value, grad_output.T)
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
    q_num_blocks_ptr,
    full_q_num_blocks_ptr,
    q_offsets_ptr,
    q_indices_ptr,
    q_num_blocks_stride_b,
    q_num_blocks_stride_h,
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
    document_id_ptr,
    document_id_size0,
):
    # One program adds up what BLOCK_N keys of one key/value head contribute to grad_key and grad_value.
    tiles_per_head = tl.cdiv(KV_LEN, BLOCK_N)
    kv_tile = tl.program_id(0) % tiles_per_head
    kv_heads = Q_HEADS // GQA_SHARED_HEADS
    b = tl.program_id(0) // tiles_per_head // kv_heads
    kv_head = tl.program_id(0) // tiles_per_head % kv_heads
    kv_start = kv_tile * BLOCK_N
    kv_idx = kv_start + tl.arange(0, BLOCK_N)
    column_exists = kv_idx < KV_LEN

    # Batch and head offsets are 64-bit: whole tensors may pass 2**31 elements.
    batch = b.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    key_ptr += batch * key_stride_b + wide_kv_head * key_stride_h
    value_ptr += batch * value_stride_b + wide_kv_head * value_stride_h
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    key = tl.load(
        key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :],
        mask=column_exists[:, None],
        other=0.0,
    )
    value = tl.load(
        value_ptr + kv_idx[:, None] * value_stride_kv + v_dim[None, :],
        mask=column_exists[:, None],
        other=0.0,
    )

    grad_key = tl.zeros([BLOCK_N, QK_HEAD_DIM_ROUNDED], tl.float32)
    grad_value = tl.zeros([BLOCK_N, V_HEAD_DIM_ROUNDED], tl.float32)
    for shared_head in tl.range(0, GQA_SHARED_HEADS):
        h = kv_head * GQA_SHARED_HEADS + shared_head
        head = h.to(tl.int64)
        head_query_ptr = query_ptr + batch * query_stride_b + head * query_stride_h
        head_grad_output_ptr = grad_output_ptr + batch * grad_output_stride_b + head * grad_output_stride_h
        aux_offset = (batch * Q_HEADS + head) * Q_LEN
        # The blocks listed for this column of blocks, those that need the mask first; a mask dimension of
        # size 1 has stride 0.
        own_block = kv_start // SPARSE_KV_BLOCK_SIZE
        line_of_blocks = batch * q_num_blocks_stride_b + h * q_num_blocks_stride_h + own_block
        listed = tl.load(q_offsets_ptr + line_of_blocks)
        last = tl.load(q_num_blocks_ptr + line_of_blocks)
        grad_key, grad_value = accumulate(
            grad_key, grad_value, key, value,
            head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
            row_shift_ptr + aux_offset, delta_ptr + aux_offset,
            Q_LEN, b, h, kv_idx,
            document_id_ptr, document_id_size0,
            q_indices_ptr + listed,
            0, last, True,
        )

        # Full blocks need no mask.
        listed += last
        last = tl.load(full_q_num_blocks_ptr + line_of_blocks)
        grad_key, grad_value = accumulate(
            grad_key, grad_value, key, value,
            head_query_ptr, query_stride_q, head_grad_output_ptr, grad_output_stride_q,
            row_shift_ptr + aux_offset, delta_ptr + aux_offset,
            Q_LEN, b, h, kv_idx,
            document_id_ptr, document_id_size0,
            q_indices_ptr + listed,
            0, last, False,
        )

    grad_key = grad_key * SM_SCALE
    grad_key_ptr += batch * grad_key_stride_b + wide_kv_head * grad_key_stride_h
    tl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + qk_dim[None, :],
        grad_key.to(grad_key_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )

    grad_value_ptr += batch * grad_value_stride_b + wide_kv_head * grad_value_stride_h
    tl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + v_dim[None, :],
        grad_value.to(grad_value_ptr.dtype.element_ty),
        mask=column_exists[:, None],
    )
