"""Fused attention, backward, dK and dV, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal
backend      Gluon, a producer warp and 2 consumer warpgroups of 64 keys   because: asked for
tile         64 queries x 128 keys, 2 stages of queries, 2 of output gradients, 133632 bytes
pipelined    no   because: registers do not hold a second tile: each step's products end with it
queries      closed form: mask is an interval in q_idx: [kv_idx, Q_LEN)
             [kv_idx, Q_LEN)
mask         one unsigned compare of a distance from where live pairs begin, on tiles that are not full
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
QK_HEAD_DIM_ROUNDED = gl.constexpr(128)
V_HEAD_DIM_ROUNDED = gl.constexpr(128)
ROW_MULTIPLE = gl.constexpr(128)  # each head's values of rows begin at a multiple, as the copy engine wants
SM_SCALE = gl.constexpr(0.08838834764831843)  # the softmax scale
SCALE_LOG2_E = gl.constexpr(0.12751743082459868)  # log2(e) times the softmax scale

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
def keep_interval(score, distance, width):
    """score where 0 <= distance < width, else -inf: one unsigned compare and one select.

    In assembly, because the compiler packs the conditions of a tile into words before it selects by them.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.u32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [score, distance, width], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def locate(program, KV_LEN, Q_HEADS):
    """Return batch, key/value head and first key of a program."""
    tiles_per_head = gl.cdiv(KV_LEN, BLOCK_N)
    kv_heads = Q_HEADS
    batch_head = program // tiles_per_head
    kv_tile = program % tiles_per_head
    return batch_head // kv_heads, batch_head % kv_heads, kv_tile * BLOCK_N


@gluon.jit
def query_tiles(b, h, kv_start, Q_LEN, KV_LEN):
    """Return which tiles of BLOCK_M queries the program's keys visit and which need no mask."""
    kv_lo = kv_start
    kv_hi = gl.minimum(kv_start + BLOCK_N, KV_LEN) - 1
    # [kv_idx, Q_LEN)
    lo = gl.minimum(kv_lo, Q_LEN) // BLOCK_M
    hi = gl.cdiv(Q_LEN, BLOCK_M)
    full_lo = gl.cdiv(gl.minimum(kv_hi, Q_LEN), BLOCK_M)
    full_hi = Q_LEN // BLOCK_M
    full_lo = gl.minimum(gl.maximum(full_lo, lo), hi)
    full_hi = gl.minimum(gl.maximum(full_hi, full_lo), hi)
    first = lo
    count = hi - lo
    return first, count, full_lo, full_hi


@gluon.jit
def tile_at(step, tiles):
    """Return the number of the tile that is visited at a step."""
    first, count, full_lo, full_hi = tiles
    return first + step


@gluon.jit
def needs_mask(step, tile, tiles):
    """Whether a tile holds pairs that are not live."""
    first, count, full_lo, full_hi = tiles
    return (tile < full_lo) | (tile >= full_hi)


@gluon.jit
def hidden(number):
    """The number, as one that the compiler knows nothing of.

    It would otherwise carry the index of each query of a tile from step to step, in registers that the sums need.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def live_queries(b, h, kv_idx, Q_LEN, KV_LEN):
    """Return the first live query of each key and how many there are: one interval, which ends at Q_LEN at most."""
    q_lo = kv_idx
    q_hi = Q_LEN
    return q_lo, gl.maximum(q_hi - q_lo, 0)


@gluon.jit
def weigh(score, row_shift, tile, checked, q_lo, q_width):
    """Turn the products of a tile into the softmax's weights, 0 where a pair is not live."""
    q_idx = hidden(tile) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    if checked:
        score = keep_interval(score, q_idx[None, :] - q_lo[:, None], q_width[:, None])
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
    tiles = query_tiles(b, h, kv_start, Q_LEN, KV_LEN)
    rows_of_head = gl.cdiv(Q_LEN, ROW_MULTIPLE) * ROW_MULTIPLE
    first_row = (b * Q_HEADS + h) * rows_of_head
    for step in range(0, tiles[1]):
        q_start = tile_at(step, tiles) * BLOCK_M
        row = first_row + q_start
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
    tiles = query_tiles(b, h, kv_start, Q_LEN, KV_LEN)
    q_lo, q_width = live_queries(b, h, kv_idx, Q_LEN, KV_LEN)
    
    # Registers hold one tile at a time beside the sums: the other warpgroup's products run while this one
    # computes. Nothing is in flight at the end of a step: were a register operand, the assembler would serialise
    # every matrix instruction.
    for step in range(0, tiles[1]):
        wait_filled(query_full, turn, QUERY_STAGES)
        query = queries.index(turn % QUERY_STAGES).reshape([BLOCK_M, QK_HEAD_DIM_ROUNDED])
        score = multiply(key, query)
        wait_filled(grad_output_full, turn, GRAD_STAGES)
        grad_output = grad_outputs.index(turn % GRAD_STAGES).reshape([BLOCK_M, V_HEAD_DIM_ROUNDED])
        grad_weight = multiply(value, grad_output)
        score = warpgroup_mma_wait(1, deps=[score])
        tile = tile_at(step, tiles)
        checked = needs_mask(step, tile, tiles)
        row_shift = row_shifts.index(turn % QUERY_STAGES).load(gl.SliceLayout(0, SCORES))
        weight = weigh(score, row_shift, tile, checked, q_lo, q_width)
        weight_operand = as_operand(weight, VALUE_OPERANDS)
        grad_value = warpgroup_mma(weight_operand, grad_output, grad_value, is_async=True)
        grad_weight = warpgroup_mma_wait(1, deps=[grad_weight])
        delta = deltas.index(turn % GRAD_STAGES).load(gl.SliceLayout(0, SCORES))
        grad_score = differentiate(weight, grad_weight, delta)
        grad_operand = as_operand(grad_score, KEY_OPERANDS)
        grad_key = warpgroup_mma(grad_operand, query, grad_key, is_async=True)
        grad_key, grad_value, weight_operand, grad_operand = warpgroup_mma_wait(
            0,
            deps=[grad_key, grad_value, weight_operand, grad_operand],
        )
        fence_async_shared()  # the copies that refill row statistics come after their reads
        free(query_empty, turn, QUERY_STAGES)
        free(grad_output_empty, turn, GRAD_STAGES)
        turn += 1

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
    )
    consumer_0 = (
        barriers, buffers,
        grad_key_ptr, grad_value_ptr, grad_key_stride_b, grad_key_stride_h, grad_key_stride_kv,
        grad_value_stride_b, grad_value_stride_h, grad_value_stride_kv, Q_LEN, KV_LEN, Q_HEADS,
        0,
    )
    consumer_1 = (
        barriers, buffers,
        grad_key_ptr, grad_value_ptr, grad_key_stride_b, grad_key_stride_h, grad_key_stride_kv,
        grad_value_stride_b, grad_value_stride_h, grad_value_stride_kv, Q_LEN, KV_LEN, Q_HEADS,
        1,
    )
    gl.warp_specialize(
        [(consume, consumer_0), (consume, consumer_1), (produce, producer)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
