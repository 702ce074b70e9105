"""Block table of a mask, for sm_90. Written by flexgen.

mask_mod     tree_mask
blocks       64 queries x 64 keys
listed       where (tree_id_q_min <= tree_id_kv_max) & (tree_id_kv_min <= tree_id_q_max)
full         where also False
leaf         tree_id_q = tree_id[q_idx]
leaf         tree_id_kv = tree_id[kv_idx]
unsolved     is_ancestor[q_idx, kv_idx]: is_ancestor is read at a query and a key, so its blocks are not known
                 without reading all of it
"""

import triton
import triton.language as tl

SPARSE_Q_BLOCK_SIZE = tl.constexpr(64)
SPARSE_KV_BLOCK_SIZE = tl.constexpr(64)
COLUMNS = tl.constexpr(1024)  # blocks of keys that are classified at a time


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
def summarise_queries(tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_ptr, tree_id_size0, Q_LEN):
    """Store the extremes, over each block of queries, of what depends on one axis alone; a NaN takes over."""
    block = tl.program_id(0)
    slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + block
    q_idx = block * SPARSE_Q_BLOCK_SIZE + tl.arange(0, SPARSE_Q_BLOCK_SIZE)
    exists = q_idx < Q_LEN
    # same_tree = tree_id[q_idx] == tree_id[kv_idx]
    tree_id_at_q = tl.load(tree_id_ptr + q_idx, mask=q_idx < tree_id_size0, other=0)
    tree_id_q = tree_id_at_q
    tl.store(tree_id_q_min_ptr + slot, tl.min(tl.where(exists, tree_id_q, 2147483647), 0))
    tl.store(tree_id_q_max_ptr + slot, tl.max(tl.where(exists, tree_id_q, -2147483648), 0))


@triton.jit
def summarise_keys(tree_id_kv_min_ptr, tree_id_kv_max_ptr, tree_id_ptr, tree_id_size0, KV_LEN):
    """Store the extremes, over each block of keys, of what depends on one axis alone; a NaN takes over."""
    block = tl.program_id(0)
    slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + block
    kv_idx = block * SPARSE_KV_BLOCK_SIZE + tl.arange(0, SPARSE_KV_BLOCK_SIZE)
    exists = kv_idx < KV_LEN
    # same_tree = tree_id[q_idx] == tree_id[kv_idx]
    tree_id_at_kv = tl.load(tree_id_ptr + kv_idx, mask=kv_idx < tree_id_size0, other=0)
    tree_id_kv = tree_id_at_kv
    tl.store(tree_id_kv_min_ptr + slot, tl.min(tl.where(exists, tree_id_kv, 2147483647), 0))
    tl.store(tree_id_kv_max_ptr + slot, tl.max(tl.where(exists, tree_id_kv, -2147483648), 0))


@triton.jit
def classify(
    q_block, kv_block, exists, tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_kv_min_ptr, tree_id_kv_max_ptr,
):
    """Return which blocks need the mask, and which are live as a whole; the others hold no live pair."""
    q_slot = q_block
    tree_id_q_min = tl.load(tree_id_q_min_ptr + q_slot).to(tl.int64)
    tree_id_q_max = tl.load(tree_id_q_max_ptr + q_slot).to(tl.int64)
    kv_slot = kv_block
    tree_id_kv_min = tl.load(tree_id_kv_min_ptr + kv_slot, mask=exists, other=0).to(tl.int64)
    tree_id_kv_max = tl.load(tree_id_kv_max_ptr + kv_slot, mask=exists, other=0).to(tl.int64)
    live = exists & ((tree_id_q_min <= tree_id_kv_max) & (tree_id_kv_min <= tree_id_q_max))
    full = live & (False)
    return live & ~full, full


@triton.jit
def count_blocks(
    partial_counts_ptr, full_counts_ptr, tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_kv_min_ptr,
    tree_id_kv_max_ptr, Q_LEN, KV_LEN,
):
    """Count the blocks of keys that each block of queries lists."""
    q_block = tl.program_id(0)
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + q_block
    num_kv_blocks = tl.cdiv(KV_LEN, SPARSE_KV_BLOCK_SIZE)
    num_partial = tl.zeros([COLUMNS], tl.int32)
    num_full = tl.zeros([COLUMNS], tl.int32)
    for first in tl.range(0, num_kv_blocks, COLUMNS):
        kv_block = first + tl.arange(0, COLUMNS)
        exists = kv_block < num_kv_blocks
        partial, full = classify(
            q_block, kv_block, exists, tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_kv_min_ptr,
            tree_id_kv_max_ptr,
        )
        num_partial += partial.to(tl.int32)
        num_full += full.to(tl.int32)
    tl.store(partial_counts_ptr + row, tl.sum(num_partial, 0))
    tl.store(full_counts_ptr + row, tl.sum(num_full, 0))


@triton.jit
def fill_blocks(
    partial_counts_ptr, full_counts_ptr, ends_ptr, kv_num_blocks_ptr, full_kv_num_blocks_ptr, kv_offsets_ptr,
    kv_indices_ptr, capacity, tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_kv_min_ptr, tree_id_kv_max_ptr,
    Q_LEN, KV_LEN,
):
    """List the blocks: those that need the mask, then the full ones; ends_ptr holds where each row's list may end.

    The first entries of the list are all blocks, in order. A row whose own list does not fit the capacity takes that
    one instead and applies the mask everywhere: that costs time, never correctness.
    """
    q_block = tl.program_id(0)
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + q_block
    num_kv_blocks = tl.cdiv(KV_LEN, SPARSE_KV_BLOCK_SIZE)
    num_partial = tl.load(partial_counts_ptr + row)
    num_full = tl.load(full_counts_ptr + row)
    end = num_kv_blocks + tl.load(ends_ptr + row)
    fits = end <= capacity
    start = tl.where(fits, end - num_partial - num_full, 0).to(tl.int32)
    tl.store(kv_offsets_ptr + row, start)
    tl.store(kv_num_blocks_ptr + row, tl.where(fits, num_partial, num_kv_blocks))
    tl.store(full_kv_num_blocks_ptr + row, tl.where(fits, num_full, 0))
    next_partial = kv_indices_ptr + start
    next_full = next_partial + num_partial
    for first in tl.range(0, tl.where(fits, num_kv_blocks, 0), COLUMNS):
        kv_block = first + tl.arange(0, COLUMNS)
        exists = kv_block < num_kv_blocks
        partial, full = classify(
            q_block, kv_block, exists, tree_id_q_min_ptr, tree_id_q_max_ptr, tree_id_kv_min_ptr,
            tree_id_kv_max_ptr,
        )
        tl.store(next_partial + tl.cumsum(partial.to(tl.int32), 0) - 1, kv_block, mask=partial)
        tl.store(next_full + tl.cumsum(full.to(tl.int32), 0) - 1, kv_block, mask=full)
        next_partial += tl.sum(partial.to(tl.int32), 0)
        next_full += tl.sum(full.to(tl.int32), 0)


@triton.jit
def drop_empty_blocks(
    kv_num_blocks_ptr, full_kv_num_blocks_ptr, kv_offsets_ptr, kv_indices_ptr, tree_id_ptr, tree_id_size0,
    is_ancestor_ptr, is_ancestor_stride0, is_ancestor_size0, is_ancestor_size1, Q_LEN, KV_LEN,
):
    """Leave out the blocks in which the mask, evaluated, has no live pair: the rule cannot tell all of them.

    A list keeps its end. Entries move towards it, the last one first, so that each is read before it is overwritten.
    """
    h = tl.program_id(1)
    b = tl.program_id(2)
    q_block = tl.program_id(0)
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + q_block
    start = tl.load(kv_offsets_ptr + row)
    num_partial = tl.load(kv_num_blocks_ptr + row)
    own_list = start >= tl.cdiv(KV_LEN, SPARSE_KV_BLOCK_SIZE)  # else that of all blocks, which rows share
    q_idx = q_block * SPARSE_Q_BLOCK_SIZE + tl.arange(0, SPARSE_Q_BLOCK_SIZE)
    first = start + num_partial
    for entry in tl.range(start + tl.where(own_list, num_partial, 0), start, -1):
        kv_block = tl.load(kv_indices_ptr + entry - 1)
        kv_idx = kv_block * SPARSE_KV_BLOCK_SIZE + tl.arange(0, SPARSE_KV_BLOCK_SIZE)
        exists = (q_idx < Q_LEN)[:, None] & (kv_idx < KV_LEN)[None, :]
        live = exists & mask_mod(
            b, h, q_idx[:, None], kv_idx[None, :], tree_id_ptr, tree_id_size0, is_ancestor_ptr,
            is_ancestor_stride0, is_ancestor_size0, is_ancestor_size1,
        )
        keep = tl.max(tl.max(live.to(tl.int32), 1), 0)
        first -= keep
        tl.store(kv_indices_ptr + first, kv_block, mask=keep > 0)
    tl.store(kv_offsets_ptr + row, first, mask=own_list)
    tl.store(kv_num_blocks_ptr + row, start + num_partial - first, mask=own_list)
