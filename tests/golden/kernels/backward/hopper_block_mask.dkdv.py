"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal
backend      Gluon, a producer warp and 2 consumer warpgroups of 64 keys   because: asked for
tile         64 queries x 128 keys, 2 stages of queries, 2 of output gradients, 68096 bytes
pipelined    yes   because: a step's sums run under the next step's
queries      the block mask's lists say which blocks are visited
mask         mask_mod, on tiles that are not full
flags        WALKED_TAIL=False, SAFE_HEAD_DIM=True, FOLD_SCALE=True, SUBTRACT_FIRST=False, FAST_TANH=False,
                 LONG_ROWS_FIRST=False
"""

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
BLOCK_M = gl.constexpr(64)  # queries of a tile
BLOCK_N = gl.constexpr(128)  # keys of a program
ROWS = gl.constexpr(64)  # keys of a warpgroup
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
QUERY_STAGES = gl.constexpr(2)  # query tiles in shared memory
GRAD_STAGES = gl.constexpr(2)  # output gradient tiles in shared memory
CONSUMER_REGISTERS = gl.constexpr(240)  # of a thread
PRODUCER_REGISTERS = gl.constexpr(24)
QK_HEAD_DIM_ROUNDED = gl.constexpr(64)
V_HEAD_DIM_ROUNDED = gl.constexpr(64)
ROW_MULTIPLE = gl.constexpr(128)  # each head's values of rows begin at a multiple, as the copy engine wants
SPARSE_KV_BLOCK_SIZE = gl.constexpr(128)
SPARSE_Q_BLOCK_SIZE = gl.constexpr(128)
TILES_PER_BLOCK = gl.constexpr(2)  # tiles of a listed block
SM_SCALE = gl.constexpr(0.125)  # the softmax scale
SCALE_LOG2_E = gl.constexpr(0.18033688011112042)  # log2(e) times the softmax scale

# Each warp of a warpgroup holds 16 rows in registers: of a tile of scores, of the sums, and of what is multiplied into
# the sums.
SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M.value, 16])
)
KEY_SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, QK_HEAD_DIM_ROUNDED.value, 16],
    )
)
KEY_OPERANDS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=KEY_SUMS.value, k_width=2))
VALUE_SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, V_HEAD_DIM_ROUNDED.value, 16],
    )
)
VALUE_OPERANDS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=VALUE_SUMS.value, k_width=2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def mask_mod(b, h, q_idx, kv_idx):
    """causal: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return q_idx >= kv_idx
    return q_idx >= kv_idx


@gluon.jit
def locate(program, KV_LEN, Q_HEADS):
    """Return batch, key/value head and first key of a program."""
    tiles_per_head = gl.cdiv(KV_LEN, BLOCK_N)
    kv_heads = Q_HEADS
    batch_head = program // tiles_per_head
    kv_tile = program % tiles_per_head
    return batch_head // kv_heads, batch_head % kv_heads, kv_tile * BLOCK_N


@gluon.jit
def query_tiles(
    b, h, kv_start, Q_LEN, KV_LEN, q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
    q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
    q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
    full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h, full_q_indices_stride_r,
):
    """Return the blocks that the block mask lists for the program's keys, those that need the mask first."""
    own_block = kv_start // SPARSE_KV_BLOCK_SIZE
    batch = b.to(gl.int64)
    # A mask dimension of size 1 has stride 0.
    line_of_blocks = batch * q_num_blocks_stride_b + h * q_num_blocks_stride_h
    line_of_blocks += own_block * q_num_blocks_stride_r
    num_partial = gl.load(q_num_blocks_ptr + line_of_blocks)
    line_of_blocks = batch * q_indices_stride_b + h * q_indices_stride_h
    line_of_blocks += own_block * q_indices_stride_r
    partial = q_indices_ptr + line_of_blocks
    line_of_blocks = batch * full_q_num_blocks_stride_b + h * full_q_num_blocks_stride_h
    line_of_blocks += own_block * full_q_num_blocks_stride_r
    num_full = gl.load(full_q_num_blocks_ptr + line_of_blocks)
    line_of_blocks = batch * full_q_indices_stride_b + h * full_q_indices_stride_h
    line_of_blocks += own_block * full_q_indices_stride_r
    full = full_q_indices_ptr + line_of_blocks
    num_blocks = num_partial + num_full
    # One block is visited at least, so that the pipeline always fills: where none is listed, one past the queries.
    past = gl.cdiv(Q_LEN, SPARSE_Q_BLOCK_SIZE)
    count = gl.maximum(num_blocks, 1) * TILES_PER_BLOCK
    return partial, count, num_partial, num_blocks, past, full


@gluon.jit
def tile_at(step, tiles):
    """Return the number of the tile that is visited at a step; after the lists, one past the queries."""
    partial, count, num_partial, num_blocks, past, full = tiles
    listed = step // TILES_PER_BLOCK
    block = gl.load(partial + listed, mask=listed < num_partial, other=0)
    in_full = listed - num_partial
    block += gl.load(full + in_full, mask=(in_full >= 0) & (listed < num_blocks), other=0)
    block = gl.where(listed < num_blocks, block, past)
    return block * TILES_PER_BLOCK + step % TILES_PER_BLOCK


@gluon.jit
def needs_mask(step, tile, tiles, Q_LEN):
    """Whether a tile holds pairs that are not live."""
    partial, count, num_partial, num_blocks, past, full = tiles
    return (step < num_partial * TILES_PER_BLOCK) | ((tile + 1) * BLOCK_M > Q_LEN)


@gluon.jit
def weigh(score, row_shift, tile, checked, kv_idx, b, h, Q_LEN):
    """Turn the products of a tile into the softmax's weights, 0 where a pair is not live."""
    q_idx = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    if checked:
        score = gl.where(
            (q_idx < Q_LEN)[None, :] & mask_mod(b, h, q_idx[None, :], kv_idx[:, None]), score, float("-inf"),
        )
    return gl.exp2(score * SCALE_LOG2_E - row_shift[None, :])


@gluon.jit
def differentiate(weight, grad_weight, delta):
    """Return the gradient of each score of a tile."""
    return weight * (grad_weight - delta[None, :])


@gluon.jit
def multiply(own, walked):
    """Start own @ walked.T, whose last dimension both share; the result is ready after a wait."""
    nothing = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, SCORES)
    return warpgroup_mma(own, walked.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def wait_filled(full, turn, SLOTS: gl.constexpr):
    """Wait until a ring holds the tile of a turn: the parity of its slot flips each time it is filled."""
    mbarrier.wait(full.index(turn % SLOTS), (turn // SLOTS) & 1)


@gluon.jit
def wait_free(empty, turn, SLOTS: gl.constexpr):
    """Wait until all consumers are done with what the slot of a turn held before; at first it held nothing."""
    mbarrier.wait(empty.index(turn % SLOTS), ((turn // SLOTS) & 1) ^ 1)


@gluon.jit
def free(empty, turn, SLOTS: gl.constexpr):
    """Tell the producer that this warpgroup is done with the tile of a turn."""
    mbarrier.arrive(empty.index(turn % SLOTS), count=1)


@gluon.jit
def as_operand(tile, LAYOUT: gl.constexpr):
    """A tile in the inputs' dtype, in the registers where the matrix instruction reads it."""
    return gl.convert_layout(tile.to(gl.bfloat16), LAYOUT)


@gluon.jit
def produce(
    descriptors, barriers, buffers,
    Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, grad_output_stride_b,
    grad_output_stride_h, key_stride_b, key_stride_h, value_stride_b, value_stride_h,
    q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
    q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
    q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
    full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h,
    full_q_indices_stride_r,
):
    """The producer warp: copies the program's keys and values, and keeps the rings filled for the consumers."""
    query_desc, grad_output_desc, key_desc, value_desc, row_shift_desc, delta_desc = descriptors
    own_full, query_full, query_empty, grad_output_full, grad_output_empty = barriers
    queries, grad_outputs, keys, values, row_shifts, deltas = buffers
    b, kv_head, kv_start = locate(gl.program_id(0), KV_LEN, Q_HEADS)
    # What is shared along a dimension has stride 0 there, and one entry in its descriptor.
    key_b, key_h = gl.where(key_stride_b == 0, 0, b), gl.where(key_stride_h == 0, 0, kv_head)
    value_b, value_h = gl.where(value_stride_b == 0, 0, b), gl.where(value_stride_h == 0, 0, kv_head)
    for warpgroup in gl.static_range(CONSUMERS):
        own_start = kv_start + warpgroup * ROWS
        mbarrier.expect(own_full.index(warpgroup), key_desc.block_type.nbytes + value_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            key_desc, [key_b, key_h, own_start, 0], own_full.index(warpgroup), keys.index(warpgroup),
        )
        tma.async_copy_global_to_shared(
            value_desc, [value_b, value_h, own_start, 0], own_full.index(warpgroup), values.index(warpgroup),
        )

    turn = 0
    h = kv_head
    query_b, query_h = gl.where(query_stride_b == 0, 0, b), gl.where(query_stride_h == 0, 0, h)
    grad_output_b = gl.where(grad_output_stride_b == 0, 0, b)
    grad_output_h = gl.where(grad_output_stride_h == 0, 0, h)
    tiles = query_tiles(
        b, h, kv_start, Q_LEN, KV_LEN, q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr,
        full_q_indices_ptr, q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r,
        q_indices_stride_b, q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b,
        full_q_num_blocks_stride_h, full_q_num_blocks_stride_r, full_q_indices_stride_b,
        full_q_indices_stride_h, full_q_indices_stride_r,
    )
    rows_of_head = gl.cdiv(Q_LEN, ROW_MULTIPLE) * ROW_MULTIPLE
    first_row = (b * Q_HEADS + h) * rows_of_head
    ahead = tile_at(0, tiles)
    for step in range(0, tiles[1]):
        q_start = ahead * BLOCK_M
        ahead = tile_at(step + 1, tiles)
        row = first_row + gl.minimum(
            q_start, rows_of_head - BLOCK_M,
        )  # past the queries, any rows of this head will do
        wait_free(query_empty, turn, QUERY_STAGES)
        query_slot = turn % QUERY_STAGES
        mbarrier.expect(
            query_full.index(query_slot), query_desc.block_type.nbytes + row_shift_desc.block_type.nbytes,
        )
        tma.async_copy_global_to_shared(
            query_desc, [query_b, query_h, q_start, 0], query_full.index(query_slot),
            queries.index(query_slot),
        )
        tma.async_copy_global_to_shared(
            row_shift_desc, [row], query_full.index(query_slot), row_shifts.index(query_slot),
        )
        wait_free(grad_output_empty, turn, GRAD_STAGES)
        grad_slot = turn % GRAD_STAGES
        mbarrier.expect(
            grad_output_full.index(grad_slot),
            grad_output_desc.block_type.nbytes + delta_desc.block_type.nbytes,
        )
        tma.async_copy_global_to_shared(
            grad_output_desc, [grad_output_b, grad_output_h, q_start, 0], grad_output_full.index(grad_slot),
            grad_outputs.index(grad_slot),
        )
        tma.async_copy_global_to_shared(
            delta_desc, [row], grad_output_full.index(grad_slot), deltas.index(grad_slot),
        )
        turn += 1


@gluon.jit
def consume(
    barriers, buffers,
    grad_key_ptr, grad_value_ptr, grad_key_stride_b, grad_key_stride_h, grad_key_stride_kv,
    grad_value_stride_b, grad_value_stride_h, grad_value_stride_kv, Q_LEN, KV_LEN, Q_HEADS,
    q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
    q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
    q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
    full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h,
    full_q_indices_stride_r,
    WARPGROUP: gl.constexpr,
):
    """A consumer warpgroup: adds up the gradients of its ROWS keys."""
    own_full, query_full, query_empty, grad_output_full, grad_output_empty = barriers
    queries, grad_outputs, keys, values, row_shifts, deltas = buffers
    b, kv_head, kv_start = locate(gl.program_id(0), KV_LEN, Q_HEADS)
    row_start = kv_start + WARPGROUP * ROWS
    kv_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    key = keys.index(WARPGROUP).reshape([ROWS, QK_HEAD_DIM_ROUNDED])
    value = values.index(WARPGROUP).reshape([ROWS, V_HEAD_DIM_ROUNDED])
    grad_key = gl.full([ROWS, QK_HEAD_DIM_ROUNDED], 0.0, gl.float32, KEY_SUMS)
    grad_value = gl.full([ROWS, V_HEAD_DIM_ROUNDED], 0.0, gl.float32, VALUE_SUMS)
    grad_key_ptr += b.to(gl.int64) * grad_key_stride_b + kv_head.to(gl.int64) * grad_key_stride_h
    grad_value_ptr += b.to(gl.int64) * grad_value_stride_b + kv_head.to(gl.int64) * grad_value_stride_h
    mbarrier.wait(own_full.index(WARPGROUP), 0)

    turn = 0
    h = kv_head
    tiles = query_tiles(
        b, h, kv_start, Q_LEN, KV_LEN, q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr,
        full_q_indices_ptr, q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r,
        q_indices_stride_b, q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b,
        full_q_num_blocks_stride_h, full_q_num_blocks_stride_r, full_q_indices_stride_b,
        full_q_indices_stride_h, full_q_indices_stride_r,
    )
    ahead = tile_at(0, tiles)
    
    # The first tile fills the pipeline.
    wait_filled(query_full, turn, QUERY_STAGES)
    score = multiply(key, queries.index(turn % QUERY_STAGES).reshape([BLOCK_M, QK_HEAD_DIM_ROUNDED]))
    wait_filled(grad_output_full, turn, GRAD_STAGES)
    grad_weight = multiply(
        value, grad_outputs.index(turn % GRAD_STAGES).reshape([BLOCK_M, V_HEAD_DIM_ROUNDED]),
    )
    score, grad_weight = warpgroup_mma_wait(0, deps=[score, grad_weight])
    tile = ahead
    ahead = tile_at(0 + 1, tiles)
    checked = needs_mask(0, tile, tiles, Q_LEN)
    row_shift = row_shifts.index(turn % QUERY_STAGES).load(gl.SliceLayout(0, SCORES))
    weight = weigh(score, row_shift, tile, checked, kv_idx, b, h, Q_LEN)
    delta = deltas.index(turn % GRAD_STAGES).load(gl.SliceLayout(0, SCORES))
    grad_score = differentiate(weight, grad_weight, delta)
    weight_operand = as_operand(weight, VALUE_OPERANDS)
    grad_operand = as_operand(grad_score, KEY_OPERANDS)
    turn += 1

    # Each step starts the products with this tile and those that add the tile before it, and computes this
    # tile's weights and gradients while the latter run. Nothing is in flight at the end of a step: were a
    # register operand, the assembler would serialise every matrix instruction.
    for step in range(1, tiles[1]):
        wait_filled(query_full, turn, QUERY_STAGES)
        score = multiply(key, queries.index(turn % QUERY_STAGES).reshape([BLOCK_M, QK_HEAD_DIM_ROUNDED]))
        wait_filled(grad_output_full, turn, GRAD_STAGES)
        grad_weight = multiply(
            value, grad_outputs.index(turn % GRAD_STAGES).reshape([BLOCK_M, V_HEAD_DIM_ROUNDED]),
        )
        grad_value = warpgroup_mma(
            weight_operand,
            grad_outputs.index((turn - 1) % GRAD_STAGES).reshape([BLOCK_M, V_HEAD_DIM_ROUNDED]), grad_value,
            is_async=True,
        )
        grad_key = warpgroup_mma(
            grad_operand, queries.index((turn - 1) % QUERY_STAGES).reshape([BLOCK_M, QK_HEAD_DIM_ROUNDED]),
            grad_key,
            is_async=True,
        )
        score, grad_weight = warpgroup_mma_wait(2, deps=[score, grad_weight])
        tile = ahead
        ahead = tile_at(step + 1, tiles)
        checked = needs_mask(step, tile, tiles, Q_LEN)
        row_shift = row_shifts.index(turn % QUERY_STAGES).load(gl.SliceLayout(0, SCORES))
        weight = weigh(score, row_shift, tile, checked, kv_idx, b, h, Q_LEN)
        delta = deltas.index(turn % GRAD_STAGES).load(gl.SliceLayout(0, SCORES))
        grad_score = differentiate(weight, grad_weight, delta)
        grad_key, grad_value, weight_operand, grad_operand = warpgroup_mma_wait(
            0,
            deps=[grad_key, grad_value, weight_operand, grad_operand],
        )
        fence_async_shared()  # the copies that refill row statistics come after their reads
        free(query_empty, turn - 1, QUERY_STAGES)
        free(grad_output_empty, turn - 1, GRAD_STAGES)
        weight_operand = as_operand(weight, VALUE_OPERANDS)
        grad_operand = as_operand(grad_score, KEY_OPERANDS)
        turn += 1
    
    grad_value = warpgroup_mma(
        weight_operand, grad_outputs.index((turn - 1) % GRAD_STAGES).reshape([BLOCK_M, V_HEAD_DIM_ROUNDED]),
        grad_value,
        is_async=True,
    )
    grad_key = warpgroup_mma(
        grad_operand, queries.index((turn - 1) % QUERY_STAGES).reshape([BLOCK_M, QK_HEAD_DIM_ROUNDED]),
        grad_key,
        is_async=True,
    )
    grad_key, grad_value, weight_operand, grad_operand = warpgroup_mma_wait(
        0,
        deps=[grad_key, grad_value, weight_operand, grad_operand],
    )
    fence_async_shared()  # the copies that refill row statistics come after their reads
    free(query_empty, turn - 1, QUERY_STAGES)
    free(grad_output_empty, turn - 1, GRAD_STAGES)

    kv_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, KEY_SUMS))
    dim = gl.arange(0, QK_HEAD_DIM_ROUNDED, layout=gl.SliceLayout(0, KEY_SUMS))
    gl.store(
        grad_key_ptr + kv_idx[:, None] * grad_key_stride_kv + dim[None, :],
        (grad_key * SM_SCALE).to(gl.bfloat16),
        mask=(kv_idx < KV_LEN)[:, None],
    )
    kv_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, VALUE_SUMS))
    dim = gl.arange(0, V_HEAD_DIM_ROUNDED, layout=gl.SliceLayout(0, VALUE_SUMS))
    gl.store(
        grad_value_ptr + kv_idx[:, None] * grad_value_stride_kv + dim[None, :],
        grad_value.to(gl.bfloat16),
        mask=(kv_idx < KV_LEN)[:, None],
    )


@gluon.jit
def backward_dkdv(
    query_desc,
    grad_output_desc,
    key_desc,
    value_desc,
    row_shift_desc,
    delta_desc,
    grad_key_ptr,
    grad_value_ptr,
    query_stride_b,
    query_stride_h,
    grad_output_stride_b,
    grad_output_stride_h,
    key_stride_b,
    key_stride_h,
    value_stride_b,
    value_stride_h,
    grad_key_stride_b,
    grad_key_stride_h,
    grad_value_stride_b,
    grad_value_stride_h,
    grad_key_stride_kv,
    grad_value_stride_kv,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
    q_num_blocks_ptr,
    q_indices_ptr,
    full_q_num_blocks_ptr,
    full_q_indices_ptr,
    q_num_blocks_stride_b,
    q_num_blocks_stride_h,
    q_num_blocks_stride_r,
    q_indices_stride_b,
    q_indices_stride_h,
    q_indices_stride_r,
    full_q_num_blocks_stride_b,
    full_q_num_blocks_stride_h,
    full_q_num_blocks_stride_r,
    full_q_indices_stride_b,
    full_q_indices_stride_h,
    full_q_indices_stride_r,
):
    """Share BLOCK_N keys of one key/value head between 2 consumer warpgroups, which one producer warp feeds."""
    keys = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, 1, 1, ROWS, QK_HEAD_DIM_ROUNDED], key_desc.layout,
    )
    values = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, 1, 1, ROWS, V_HEAD_DIM_ROUNDED], value_desc.layout,
    )
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [QUERY_STAGES, 1, 1, BLOCK_M, QK_HEAD_DIM_ROUNDED], query_desc.layout,
    )
    grad_outputs = gl.allocate_shared_memory(
        gl.bfloat16, [GRAD_STAGES, 1, 1, BLOCK_M, V_HEAD_DIM_ROUNDED], grad_output_desc.layout,
    )
    row_shifts = gl.allocate_shared_memory(gl.float32, [QUERY_STAGES, BLOCK_M], row_shift_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, BLOCK_M], delta_desc.layout)
    # Full: the copy engine has written the bytes that the producer announced. Empty: each consumer has arrived.
    own_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    query_full = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], BARRIER)
    query_empty = gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], BARRIER)
    grad_output_full = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], BARRIER)
    grad_output_empty = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], BARRIER)
    for warpgroup in gl.static_range(CONSUMERS):
        mbarrier.init(own_full.index(warpgroup), count=1)
    for slot in gl.static_range(QUERY_STAGES):
        mbarrier.init(query_full.index(slot), count=1)
        mbarrier.init(query_empty.index(slot), count=CONSUMERS)
    for slot in gl.static_range(GRAD_STAGES):
        mbarrier.init(grad_output_full.index(slot), count=1)
        mbarrier.init(grad_output_empty.index(slot), count=CONSUMERS)
    fence_async_shared()  # the copy engine sees the barriers
    descriptors = (query_desc, grad_output_desc, key_desc, value_desc, row_shift_desc, delta_desc)
    barriers = (own_full, query_full, query_empty, grad_output_full, grad_output_empty)
    buffers = (queries, grad_outputs, keys, values, row_shifts, deltas)
    producer = (
        descriptors, barriers, buffers,
        Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, grad_output_stride_b,
        grad_output_stride_h, key_stride_b, key_stride_h, value_stride_b, value_stride_h,
        q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
        q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
        q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
        full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h,
        full_q_indices_stride_r,
    )
    consumer_0 = (
        barriers, buffers,
        grad_key_ptr, grad_value_ptr, grad_key_stride_b, grad_key_stride_h, grad_key_stride_kv,
        grad_value_stride_b, grad_value_stride_h, grad_value_stride_kv, Q_LEN, KV_LEN, Q_HEADS,
        q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
        q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
        q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
        full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h,
        full_q_indices_stride_r,
        0,
    )
    consumer_1 = (
        barriers, buffers,
        grad_key_ptr, grad_value_ptr, grad_key_stride_b, grad_key_stride_h, grad_key_stride_kv,
        grad_value_stride_b, grad_value_stride_h, grad_value_stride_kv, Q_LEN, KV_LEN, Q_HEADS,
        q_num_blocks_ptr, q_indices_ptr, full_q_num_blocks_ptr, full_q_indices_ptr,
        q_num_blocks_stride_b, q_num_blocks_stride_h, q_num_blocks_stride_r, q_indices_stride_b,
        q_indices_stride_h, q_indices_stride_r, full_q_num_blocks_stride_b, full_q_num_blocks_stride_h,
        full_q_num_blocks_stride_r, full_q_indices_stride_b, full_q_indices_stride_h,
        full_q_indices_stride_r,
        1,
    )
    gl.warp_specialize(
        [(consume, consumer_0), (consume, consumer_1), (produce, producer)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
