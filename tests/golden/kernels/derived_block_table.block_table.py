"""Block table of a mask, for sm_90. Written by flexgen.

mask_mod     document_mask
blocks       64 queries x 64 keys
listed       where (document_id_q_min <= document_id_kv_max) & (document_id_kv_min <= document_id_q_max)
full         where also (document_id_q_max <= document_id_kv_min) & (document_id_kv_max <= document_id_q_min)
leaf         document_id_q = document_id[q_idx]
leaf         document_id_kv = document_id[kv_idx]
"""

import triton
import triton.language as tl

SPARSE_Q_BLOCK_SIZE = tl.constexpr(64)
SPARSE_KV_BLOCK_SIZE = tl.constexpr(64)
COLUMNS = tl.constexpr(1024)  # blocks of keys that are classified at a time


@triton.jit
def summarise_queries(
    document_id_q_min_ptr, document_id_q_max_ptr, document_id_ptr, document_id_size0, Q_LEN,
):
    """Store the extremes, over each block of queries, of what depends on one axis alone; a NaN takes over."""
    block = tl.program_id(0)
    slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + block
    q_idx = block * SPARSE_Q_BLOCK_SIZE + tl.arange(0, SPARSE_Q_BLOCK_SIZE)
    exists = q_idx < Q_LEN
    # return document_id[q_idx] == document_id[kv_idx]
    document_id_at_q = tl.load(document_id_ptr + q_idx, mask=q_idx < document_id_size0, other=0)
    document_id_q = document_id_at_q
    tl.store(document_id_q_min_ptr + slot, tl.min(tl.where(exists, document_id_q, 2147483647), 0))
    tl.store(document_id_q_max_ptr + slot, tl.max(tl.where(exists, document_id_q, -2147483648), 0))


@triton.jit
def summarise_keys(
    document_id_kv_min_ptr, document_id_kv_max_ptr, document_id_ptr, document_id_size0, KV_LEN,
):
    """Store the extremes, over each block of keys, of what depends on one axis alone; a NaN takes over."""
    block = tl.program_id(0)
    slot = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + block
    kv_idx = block * SPARSE_KV_BLOCK_SIZE + tl.arange(0, SPARSE_KV_BLOCK_SIZE)
    exists = kv_idx < KV_LEN
    # return document_id[q_idx] == document_id[kv_idx]
    document_id_at_kv = tl.load(document_id_ptr + kv_idx, mask=kv_idx < document_id_size0, other=0)
    document_id_kv = document_id_at_kv
    tl.store(document_id_kv_min_ptr + slot, tl.min(tl.where(exists, document_id_kv, 2147483647), 0))
    tl.store(document_id_kv_max_ptr + slot, tl.max(tl.where(exists, document_id_kv, -2147483648), 0))


@triton.jit
def classify(
    q_block, kv_block, exists, document_id_q_min_ptr, document_id_q_max_ptr, document_id_kv_min_ptr,
    document_id_kv_max_ptr,
):
    """Return which blocks need the mask, and which are live as a whole; the others hold no live pair."""
    q_slot = q_block
    document_id_q_min = tl.load(document_id_q_min_ptr + q_slot).to(tl.int64)
    document_id_q_max = tl.load(document_id_q_max_ptr + q_slot).to(tl.int64)
    kv_slot = kv_block
    document_id_kv_min = tl.load(document_id_kv_min_ptr + kv_slot, mask=exists, other=0).to(tl.int64)
    document_id_kv_max = tl.load(document_id_kv_max_ptr + kv_slot, mask=exists, other=0).to(tl.int64)
    live = exists & ((document_id_q_min <= document_id_kv_max) & (document_id_kv_min <= document_id_q_max))
    full = live & ((document_id_q_max <= document_id_kv_min) & (document_id_kv_max <= document_id_q_min))
    return live & ~full, full


@triton.jit
def count_blocks(
    partial_counts_ptr, full_counts_ptr, document_id_q_min_ptr, document_id_q_max_ptr, document_id_kv_min_ptr,
    document_id_kv_max_ptr, Q_LEN, KV_LEN,
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
            q_block, kv_block, exists, document_id_q_min_ptr, document_id_q_max_ptr, document_id_kv_min_ptr,
            document_id_kv_max_ptr,
        )
        num_partial += partial.to(tl.int32)
        num_full += full.to(tl.int32)
    tl.store(partial_counts_ptr + row, tl.sum(num_partial, 0))
    tl.store(full_counts_ptr + row, tl.sum(num_full, 0))


@triton.jit
def fill_blocks(
    partial_counts_ptr, full_counts_ptr, ends_ptr, kv_num_blocks_ptr, full_kv_num_blocks_ptr, kv_offsets_ptr,
    kv_indices_ptr, capacity, document_id_q_min_ptr, document_id_q_max_ptr, document_id_kv_min_ptr,
    document_id_kv_max_ptr, Q_LEN, KV_LEN,
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
            q_block, kv_block, exists, document_id_q_min_ptr, document_id_q_max_ptr, document_id_kv_min_ptr,
            document_id_kv_max_ptr,
        )
        tl.store(next_partial + tl.cumsum(partial.to(tl.int32), 0) - 1, kv_block, mask=partial)
        tl.store(next_full + tl.cumsum(full.to(tl.int32), 0) - 1, kv_block, mask=full)
        next_partial += tl.sum(partial.to(tl.int32), 0)
        next_full += tl.sum(full.to(tl.int32), 0)
