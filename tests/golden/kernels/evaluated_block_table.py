"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     tree_mask
tile         64 query rows x 64 keys, 4 warps, 3 stages   because: fits; masked: small tiles waste fewer keys
                 at the mask's edges (measured on H200)
keys         64 x 64 blocks, listed on the device: (tree_id[q_idx] == tree_id[kv_idx]) is not solved for
                 kv_idx: it loads tree_id at an index that depends on kv_idx
rows safe    no   because: no key was found that is live for every query
flags        IS_DIVISIBLE=True, SAFE_HEAD_DIM=True, PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False,
                 BLOCKS_ARE_CONTIGUOUS=False, HAS_FULL_BLOCKS=True, USE_TMA=False, USE_SUBTILING=False,
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
SPARSE_Q_BLOCK_SIZE = tl.constexpr(64)
SM_SCALE = tl.constexpr(0.125)
SCALE_LOG2_E = tl.constexpr(0.18033688011112042)  # SM_SCALE * log2(e)
ROW_MAX_FLOOR = tl.constexpr(-1e+38)  # below any score; finite when scaled


@triton.jit
def mask_mod(
    b, h, q_idx, kv_idx, tree_id_ptr, tree_id_size0, is_ancestor_ptr, is_ancestor_stride0, is_ancestor_size0,
    is_ancestor_size1,
):
    """tree_mask: the mask of one (query, key) pair; indices broadcast to the tile."""
    # same_tree = tree_id[q_idx] == tree_id[kv_idx]
    tree_id_at_q = tl.load(tree_id_ptr + q_idx, mask=q_idx < tree_id_size0, other=0)
    tree_id_at_kv = tl.load(tree_id_ptr + kv_idx, mask=kv_idx < tree_id_size0, other=0)
    same_tree = tree_id_at_q == tree_id_at_kv
    # return same_tree & is_ancestor[q_idx, kv_idx]
    is_ancestor_at_q_kv = tl.load(
        is_ancestor_ptr + q_idx * is_ancestor_stride0 + kv_idx,
        mask=(q_idx < is_ancestor_size0) & (kv_idx < is_ancestor_size1),
        other=0,
    ) != 0
    return same_tree & is_ancestor_at_q_kv


@triton.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * alpha[:, None]


@triton.jit
def attend(
    acc, row_max, row_sum, query,
    key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
    tree_id_ptr, tree_id_size0, is_ancestor_ptr, is_ancestor_stride0, is_ancestor_size0,
    is_ancestor_size1,
    kv_indices_ptr,
    first, last, CHECKED: tl.constexpr,
):
    """Take one step of the online softmax for each key tile from first to last - 1 of a block list."""
    qk_dim = tl.arange(0, QK_HEAD_DIM_ROUNDED)
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    for tile in tl.range(first, last):
        block = tl.load(kv_indices_ptr + tile)
        kv_start = block * BLOCK_N
        kv_idx = kv_start + tl.arange(0, BLOCK_N)
        key = tl.load(key_ptr + kv_idx[:, None] * key_stride_kv + qk_dim[None, :])
        score = tl.dot(query, key.T)
        if CHECKED:
            score = tl.where(
                mask_mod(
                    b, h, q_idx[:, None], kv_idx[None, :], tree_id_ptr, tree_id_size0, is_ancestor_ptr,
                    is_ancestor_stride0, is_ancestor_size0, is_ancestor_size1,
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
    output_stride_b,
    output_stride_h,
    output_stride_q,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
    tree_id_ptr,
    tree_id_size0,
    is_ancestor_ptr,
    is_ancestor_stride0,
    is_ancestor_size0,
    is_ancestor_size1,
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

    # The key blocks listed for this row of blocks, those that need the mask first; a mask dimension of size 1 has
    # stride 0.
    q_block = q_start // SPARSE_Q_BLOCK_SIZE
    row_of_blocks = batch * kv_num_blocks_stride_b + h * kv_num_blocks_stride_h + q_block
    listed = tl.load(kv_offsets_ptr + row_of_blocks)
    num_blocks = tl.load(kv_num_blocks_ptr + row_of_blocks)
    last = num_blocks
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
        tree_id_ptr, tree_id_size0, is_ancestor_ptr, is_ancestor_stride0, is_ancestor_size0,
        is_ancestor_size1,
        kv_indices_ptr + listed,
        0, last, True,
    )

    # Full blocks need no mask.
    listed += num_blocks
    last = tl.load(full_kv_num_blocks_ptr + row_of_blocks)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, query,
        key_ptr, key_stride_kv, value_ptr, value_stride_kv, b, h, q_idx,
        tree_id_ptr, tree_id_size0, is_ancestor_ptr, is_ancestor_stride0, is_ancestor_size0,
        is_ancestor_size1,
        kv_indices_ptr + listed,
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
    )
