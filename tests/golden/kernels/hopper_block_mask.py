"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal
backend      Gluon, a producer warp and 2 consumer warpgroups of 64 rows   because: blocks of 128 x 128 are
                 listed
tile         128 query rows x 128 keys, 2 stages, 164864 bytes
keys         the block mask's lists say which blocks are visited
mask         mask_mod, on tiles that are not full
rows         head after head   because: rows are alike in length
programs     one for each tile of rows   because: long rows: the scheduler balances programs, and a walk gains
                 nothing
rows safe    no   because: a block table may leave rows without a block
flags        KV_TAIL=True, SAFE_HEAD_DIM=True, FOLD_SCALE=True, FAST_TANH=False, OUTPUT_LOGSUMEXP=True,
                 OUTPUT_MAX=True
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Template variables; docs/options.md says what each one means.
BLOCK_M = gl.constexpr(128)  # query rows of a program
ROWS = gl.constexpr(64)  # query rows of a warpgroup
BLOCK_N = gl.constexpr(128)  # keys of a tile
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
STAGES = gl.constexpr(2)  # slots of the ring: a key and a value tile each
CONSUMER_REGISTERS = gl.constexpr(240)  # of a thread
PRODUCER_REGISTERS = gl.constexpr(24)
QK_HEAD_DIM_ROUNDED = gl.constexpr(128)
V_HEAD_DIM_ROUNDED = gl.constexpr(128)
SPARSE_Q_BLOCK_SIZE = gl.constexpr(128)
SPARSE_KV_BLOCK_SIZE = gl.constexpr(128)
MAX_SCALE = gl.constexpr(0.08838834764831843)  # of a row maximum, to be a score
WEIGHT_SCALE = gl.constexpr(0.12751743082459868)  # log2(e) times the softmax scale; in base 2
ROW_MAX_FLOOR = gl.constexpr(-1e+38)  # below any score; finite when scaled

# Each warp of a warpgroup holds 16 rows in registers: scores, the accumulator, and weights as an operand.
SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
OUTPUTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUTPUTS.value, k_width=2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@gluon.jit
def locate(row_tile, Q_LEN, Q_HEADS):
    """Return batch, head and first query of a row tile."""
    tiles_per_head = gl.cdiv(Q_LEN, BLOCK_M)
    q_tile = row_tile % tiles_per_head
    batch_head = row_tile // tiles_per_head
    return batch_head // Q_HEADS, batch_head % Q_HEADS, q_tile * BLOCK_M


@gluon.jit
def key_tiles(
    b, h, q_start, Q_LEN, KV_LEN, kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr,
    full_kv_indices_ptr, kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q,
    kv_indices_stride_b, kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
    full_kv_indices_stride_h, full_kv_indices_stride_q,
):
    """Return the key blocks that the block mask lists for a row tile, those that need the mask first."""
    q_block = q_start // SPARSE_Q_BLOCK_SIZE
    batch = b.to(gl.int64)
    # A mask dimension of size 1 has stride 0.
    row_of_blocks = batch * kv_num_blocks_stride_b + h * kv_num_blocks_stride_h + q_block * kv_num_blocks_stride_q
    partial = kv_indices_ptr + batch * kv_indices_stride_b + h * kv_indices_stride_h + q_block * kv_indices_stride_q
    num_partial = gl.load(kv_num_blocks_ptr + row_of_blocks)
    row_of_blocks = (
        batch * full_kv_num_blocks_stride_b + h * full_kv_num_blocks_stride_h + q_block * full_kv_num_blocks_stride_q
    )
    full = (
        full_kv_indices_ptr
        + batch * full_kv_indices_stride_b
        + h * full_kv_indices_stride_h
        + q_block * full_kv_indices_stride_q
    )
    num_blocks = num_partial + gl.load(full_kv_num_blocks_ptr + row_of_blocks)
    # One block is visited at least, so that the pipeline always fills: where none is listed, one past the keys.
    past = gl.cdiv(KV_LEN, SPARSE_KV_BLOCK_SIZE)
    count = gl.maximum(num_blocks, 1)
    return partial, count, num_partial, num_blocks, past, full


@gluon.jit
def tile_at(step, tiles):
    """Return the number of the key tile that is visited at a step; after the lists, one past the keys."""
    partial, count, num_partial, num_blocks, past, full = tiles
    listed = step
    block = gl.load(partial + listed, mask=listed < num_partial, other=0)
    in_full = listed - num_partial
    block += gl.load(full + in_full, mask=(in_full >= 0) & (listed < num_blocks), other=0)
    block = gl.where(listed < num_blocks, block, past)
    return block


@gluon.jit
def needs_mask(step, tile, tiles, KV_LEN):
    """Whether a key tile holds keys that are not live for each query."""
    partial, count, num_partial, num_blocks, past, full = tiles
    return (step < num_partial) | ((tile + 1) * BLOCK_N > KV_LEN)


@gluon.jit
def finish_scores(score, tile, checked, q_idx, b, h, KV_LEN):
    """Turn the products of a key tile into scores: -inf where no key is live."""
    kv_idx = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if checked:
        score = gl.where(
            (kv_idx < KV_LEN)[None, :] & mask_mod(b, h, q_idx[:, None], kv_idx[None, :]), score,
            float("-inf"),
        )
    return score


@gluon.jit
def softmax(score, row_max, row_sum):
    """One step of the online softmax: weights, the factor of what was summed before, and the row statistics."""
    # row_max starts at a finite floor, so a row with no live key yet gives weights of 0, never NaN.
    new_max = gl.maximum(row_max, gl.max(score, 1))
    alpha = gl.exp2((row_max - new_max) * WEIGHT_SCALE)
    weight = gl.exp2(score * WEIGHT_SCALE - (new_max * WEIGHT_SCALE)[:, None])
    row_sum = row_sum * alpha + gl.sum(weight, 1)
    return weight, alpha, new_max, row_sum


@gluon.jit
def multiply(query, key):
    """Start query @ key.T of one tile; the result is ready after a wait."""
    nothing = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    key = key.reshape([BLOCK_N, QK_HEAD_DIM_ROUNDED]).permute((1, 0))
    return warpgroup_mma(query, key, nothing, use_acc=False, is_async=True)


@gluon.jit
def accumulate(weight, value, acc):
    """Start acc + weight @ value of one tile; the weights stay in registers, and must until a wait."""
    return warpgroup_mma(weight, value.reshape([BLOCK_N, V_HEAD_DIM_ROUNDED]), acc, is_async=True)


@gluon.jit
def rescale(acc, alpha):
    """Scale each row of the accumulator."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUTS))[:, None]


@gluon.jit
def as_operand(weight):
    """Weights in the inputs' dtype, in the registers where the matrix instruction reads them."""
    return gl.convert_layout(weight.to(gl.bfloat16), WEIGHTS)


@gluon.jit
def store_rows(
    acc, row_max, row_sum, b, h, row_start,
    output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b, output_stride_h, output_stride_q,
    Q_LEN, Q_HEADS,
):
    """Divide by the row sums and write a warpgroup's rows and their statistics."""
    batch = b.to(gl.int64)
    head = h.to(gl.int64)
    row = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUTS))
    v_dim = gl.arange(0, V_HEAD_DIM_ROUNDED, layout=gl.SliceLayout(0, OUTPUTS))
    # A row without a live key has row_sum 0: its output is 0, its logsumexp and maximum -inf.
    row_is_empty = row_sum == 0.0
    inverse = 1.0 / gl.where(row_is_empty, 1.0, row_sum)
    output = rescale(acc, inverse)
    output_ptr += batch * output_stride_b + head * output_stride_h
    gl.store(
        output_ptr + row[:, None] * output_stride_q + v_dim[None, :],
        output.to(gl.bfloat16),
        mask=(row < Q_LEN)[:, None],
    )
    q_row = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    aux_offset = (batch * Q_HEADS + head) * Q_LEN + q_row
    natural_max = row_max * MAX_SCALE
    logsumexp = natural_max + gl.log(gl.where(row_is_empty, 1.0, row_sum))
    logsumexp = gl.where(row_is_empty, float("-inf"), logsumexp)
    gl.store(logsumexp_ptr + aux_offset, logsumexp, mask=q_row < Q_LEN)
    max_score = gl.where(row_is_empty, float("-inf"), natural_max)
    gl.store(max_scores_ptr + aux_offset, max_score, mask=q_row < Q_LEN)


@gluon.jit
def next_slot(slot, phase):
    """Go to the next slot of the ring; the parity to wait for flips each time around."""
    slot += 1
    wrapped = slot == STAGES
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def load_tile(
    row_tile, slot, phase, descriptors, barriers, buffers,
    Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, key_stride_b, key_stride_h,
    value_stride_b, value_stride_h,
    kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
    kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
    kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
    full_kv_indices_stride_h, full_kv_indices_stride_q,
):
    """Copy a row tile's queries, and into the ring the key and value tiles it visits; return where the ring is."""
    query_desc, key_desc, value_desc = descriptors
    query_full, key_full, key_empty, value_full, value_empty = barriers
    queries, keys, values = buffers
    b, h, q_start = locate(row_tile, Q_LEN, Q_HEADS)
    tiles = key_tiles(
        b, h, q_start, Q_LEN, KV_LEN, kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr,
        full_kv_indices_ptr, kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q,
        kv_indices_stride_b, kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
        full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
        full_kv_indices_stride_h, full_kv_indices_stride_q,
    )
    kv_head = h
    # What is shared along a dimension has stride 0 there, and one entry in its descriptor.
    query_b, query_h = gl.where(query_stride_b == 0, 0, b), gl.where(query_stride_h == 0, 0, h)
    key_b, key_h = gl.where(key_stride_b == 0, 0, b), gl.where(key_stride_h == 0, 0, kv_head)
    value_b, value_h = gl.where(value_stride_b == 0, 0, b), gl.where(value_stride_h == 0, 0, kv_head)

    for warpgroup in gl.static_range(CONSUMERS):
        mbarrier.expect(query_full.index(warpgroup), query_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            query_desc, [query_b, query_h, q_start + warpgroup * ROWS, 0], query_full.index(warpgroup),
            queries.index(warpgroup),
        )

    for step in range(0, tiles[1]):
        kv_start = tile_at(step, tiles) * BLOCK_N
        # A slot is free once all consumers have arrived since it was last filled: the parity before this one.
        mbarrier.wait(key_empty.index(slot), phase ^ 1)
        mbarrier.expect(key_full.index(slot), key_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            key_desc, [key_b, key_h, kv_start, 0], key_full.index(slot), keys.index(slot),
        )
        mbarrier.wait(value_empty.index(slot), phase ^ 1)
        mbarrier.expect(value_full.index(slot), value_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            value_desc, [value_b, value_h, kv_start, 0], value_full.index(slot), values.index(slot),
        )
        slot, phase = next_slot(slot, phase)
    return slot, phase


@gluon.jit
def attend_tile(
    row_tile, slot, phase, barriers, buffers,
    output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b, output_stride_h, output_stride_q,
    Q_LEN, KV_LEN, Q_HEADS,
    kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
    kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
    kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
    full_kv_indices_stride_h, full_kv_indices_stride_q,
    WARPGROUP: gl.constexpr,
):
    """Compute one warpgroup's rows of a row tile; return where the ring is."""
    query_full, key_full, key_empty, value_full, value_empty = barriers
    queries, keys, values = buffers
    b, h, q_start = locate(row_tile, Q_LEN, Q_HEADS)
    tiles = key_tiles(
        b, h, q_start, Q_LEN, KV_LEN, kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr,
        full_kv_indices_ptr, kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q,
        kv_indices_stride_b, kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
        full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
        full_kv_indices_stride_h, full_kv_indices_stride_q,
    )
    row_start = q_start + WARPGROUP * ROWS
    q_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    query = queries.index(WARPGROUP).reshape([ROWS, QK_HEAD_DIM_ROUNDED])
    row_max = gl.full([ROWS], ROW_MAX_FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.full([ROWS, V_HEAD_DIM_ROUNDED], 0.0, gl.float32, OUTPUTS)
    mbarrier.wait(query_full.index(WARPGROUP), 0)

    # The first key tile fills the pipeline.
    mbarrier.wait(key_full.index(slot), phase)
    score = multiply(query, keys.index(slot))
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_empty.index(slot), count=1)
    tile = tile_at(0, tiles)
    checked = needs_mask(0, tile, tiles, KV_LEN)
    score = finish_scores(score, tile, checked, q_idx, b, h, KV_LEN)
    weight, alpha, row_max, row_sum = softmax(score, row_max, row_sum)
    operand = as_operand(weight)
    value_slot, value_phase = slot, phase
    slot, phase = next_slot(slot, phase)

    # Each step starts the products with this key tile and with the value tile before it, and computes this tile's
    # weights while the latter run. Nothing is in flight at the end of a step: were a register operand, the
    # assembler would serialise every matrix instruction.
    for step in range(1, tiles[1]):
        mbarrier.wait(key_full.index(slot), phase)
        score = multiply(query, keys.index(slot))
        mbarrier.wait(value_full.index(value_slot), value_phase)
        acc = accumulate(operand, values.index(value_slot), acc)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(key_empty.index(slot), count=1)
        tile = tile_at(step, tiles)
        checked = needs_mask(step, tile, tiles, KV_LEN)
        score = finish_scores(score, tile, checked, q_idx, b, h, KV_LEN)
        weight, alpha, row_max, row_sum = softmax(score, row_max, row_sum)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        mbarrier.arrive(value_empty.index(value_slot), count=1)
        acc = rescale(acc, alpha)
        operand = as_operand(weight)
        value_slot, value_phase = slot, phase
        slot, phase = next_slot(slot, phase)

    mbarrier.wait(value_full.index(value_slot), value_phase)
    acc = accumulate(operand, values.index(value_slot), acc)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    mbarrier.arrive(value_empty.index(value_slot), count=1)
    store_rows(
        acc, row_max, row_sum, b, h, row_start, output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b,
        output_stride_h, output_stride_q, Q_LEN, Q_HEADS,
    )
    return slot, phase


@gluon.jit
def produce(
    descriptors, barriers, buffers,
    Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, key_stride_b, key_stride_h,
    value_stride_b, value_stride_h,
    kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
    kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
    kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
    full_kv_indices_stride_h, full_kv_indices_stride_q,
):
    """The producer warp: keeps the ring filled for the consumers."""
    slot = 0
    phase = 0
    load_tile(
        gl.program_id(0), slot, phase, descriptors, barriers, buffers, Q_LEN, KV_LEN, Q_HEADS, query_stride_b,
        query_stride_h, key_stride_b, key_stride_h, value_stride_b, value_stride_h, kv_num_blocks_ptr,
        kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr, kv_num_blocks_stride_b,
        kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b, kv_indices_stride_h,
        kv_indices_stride_q, full_kv_num_blocks_stride_b, full_kv_num_blocks_stride_h,
        full_kv_num_blocks_stride_q, full_kv_indices_stride_b, full_kv_indices_stride_h,
        full_kv_indices_stride_q,
    )


@gluon.jit
def consume(
    barriers, buffers,
    output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b, output_stride_h, output_stride_q,
    Q_LEN, KV_LEN, Q_HEADS,
    kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
    kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
    kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
    full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
    full_kv_indices_stride_h, full_kv_indices_stride_q,
    WARPGROUP: gl.constexpr,
):
    """A consumer warpgroup: computes its rows of each row tile."""
    slot = 0
    phase = 0
    attend_tile(
        gl.program_id(0), slot, phase, barriers, buffers, output_ptr, logsumexp_ptr, max_scores_ptr,
        output_stride_b, output_stride_h, output_stride_q, Q_LEN, KV_LEN, Q_HEADS, kv_num_blocks_ptr,
        kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr, kv_num_blocks_stride_b,
        kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b, kv_indices_stride_h,
        kv_indices_stride_q, full_kv_num_blocks_stride_b, full_kv_num_blocks_stride_h,
        full_kv_num_blocks_stride_q, full_kv_indices_stride_b, full_kv_indices_stride_h,
        full_kv_indices_stride_q, WARPGROUP,
    )


@gluon.jit
def forward(
    query_desc,
    key_desc,
    value_desc,
    output_ptr,
    logsumexp_ptr,
    max_scores_ptr,
    query_stride_b,
    query_stride_h,
    key_stride_b,
    key_stride_h,
    value_stride_b,
    value_stride_h,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
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
):
    """Share a row tile of BLOCK_M queries between 2 consumer warpgroups, which one producer warp feeds."""
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, 1, 1, ROWS, QK_HEAD_DIM_ROUNDED], query_desc.layout,
    )
    keys = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_N, QK_HEAD_DIM_ROUNDED], key_desc.layout,
    )
    values = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 1, 1, BLOCK_N, V_HEAD_DIM_ROUNDED], value_desc.layout,
    )
    # Full: the copy engine has written the bytes that the producer announced. Empty: each consumer has arrived.
    query_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for warpgroup in gl.static_range(CONSUMERS):
        mbarrier.init(query_full.index(warpgroup), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_empty.index(slot), count=CONSUMERS)
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_empty.index(slot), count=CONSUMERS)
    fence_async_shared()  # the copy engine sees the barriers
    descriptors = (query_desc, key_desc, value_desc)
    barriers = (query_full, key_full, key_empty, value_full, value_empty)
    buffers = (queries, keys, values)
    producer = (
        descriptors, barriers, buffers,
        Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, key_stride_b, key_stride_h,
        value_stride_b, value_stride_h,
        kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
        kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
        kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
        full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
        full_kv_indices_stride_h, full_kv_indices_stride_q,
    )
    consumer_0 = (
        barriers, buffers,
        output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b, output_stride_h, output_stride_q,
        Q_LEN, KV_LEN, Q_HEADS,
        kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
        kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
        kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
        full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
        full_kv_indices_stride_h, full_kv_indices_stride_q,
        0,
    )
    consumer_1 = (
        barriers, buffers,
        output_ptr, logsumexp_ptr, max_scores_ptr, output_stride_b, output_stride_h, output_stride_q,
        Q_LEN, KV_LEN, Q_HEADS,
        kv_num_blocks_ptr, kv_indices_ptr, full_kv_num_blocks_ptr, full_kv_indices_ptr,
        kv_num_blocks_stride_b, kv_num_blocks_stride_h, kv_num_blocks_stride_q, kv_indices_stride_b,
        kv_indices_stride_h, kv_indices_stride_q, full_kv_num_blocks_stride_b,
        full_kv_num_blocks_stride_h, full_kv_num_blocks_stride_q, full_kv_indices_stride_b,
        full_kv_indices_stride_h, full_kv_indices_stride_q,
        1,
    )
    gl.warp_specialize(
        [(consume, consumer_0), (consume, consumer_1), (produce, producer)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
