"""Fused attention, backward, dQ, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     causal
backend      Gluon, a producer warp and 2 consumer warpgroups of 64 queries   because: asked for
tile         128 queries x 64 keys, 2 stages of keys, 1 of values, 230400 bytes
pipelined    yes   because: a step's sums run under the next step's
keys         closed form: mask is an interval in kv_idx: [0, q_idx + 1)
             [0, q_idx + 1)
mask         one unsigned compare of a distance from where live pairs begin, on tiles that are not full
flags        WALKED_TAIL=False, SAFE_HEAD_DIM=True, FOLD_SCALE=True, SUBTRACT_FIRST=False, FAST_TANH=False,
                 LONG_ROWS_FIRST=True
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
BLOCK_M = gl.constexpr(128)  # queries of a program
BLOCK_N = gl.constexpr(64)  # keys of a tile
ROWS = gl.constexpr(64)  # queries of a warpgroup
CONSUMERS = gl.constexpr(2)  # warpgroups that compute
KEY_STAGES = gl.constexpr(2)  # key tiles in shared memory
VALUE_STAGES = gl.constexpr(1)  # value tiles in shared memory
CONSUMER_REGISTERS = gl.constexpr(240)  # of a thread
PRODUCER_REGISTERS = gl.constexpr(24)
QK_HEAD_DIM_ROUNDED = gl.constexpr(256)
V_HEAD_DIM_ROUNDED = gl.constexpr(256)
ROW_MULTIPLE = gl.constexpr(128)  # each head's values of rows begin at a multiple, as the copy engine wants
SM_SCALE = gl.constexpr(0.0625)  # the softmax scale
SCALE_LOG2_E = gl.constexpr(0.09016844005556021)  # log2(e) times the softmax scale

# Each warp of a warpgroup holds 16 rows in registers: of a tile of scores, of the sums, and of what is multiplied into
# the sums.
SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N.value, 16])
)
QUERY_SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, 1],
        instr_shape=[16, QK_HEAD_DIM_ROUNDED.value, 16],
    )
)
QUERY_OPERANDS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=QUERY_SUMS.value, k_width=2))
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
def locate(program, Q_LEN, Q_HEADS):
    """Return batch, head and first query of a program; the last queries, which visit most keys, come first."""
    tiles_per_head = gl.cdiv(Q_LEN, BLOCK_M)
    batch_head = program // tiles_per_head
    q_tile = tiles_per_head - 1 - program % tiles_per_head
    return batch_head // Q_HEADS, batch_head % Q_HEADS, q_tile * BLOCK_M


@gluon.jit
def key_tiles(b, h, q_start, Q_LEN, KV_LEN):
    """Return which tiles of BLOCK_N keys the program's queries visit and which need no mask."""
    q_lo = q_start
    q_hi = gl.minimum(q_start + BLOCK_M, Q_LEN) - 1
    # [0, q_idx + 1)
    lo = 0
    hi = gl.cdiv(gl.minimum(q_hi + 1, KV_LEN), BLOCK_N)
    full_hi = gl.minimum(q_lo + 1, KV_LEN) // BLOCK_N
    full_hi = gl.minimum(gl.maximum(full_hi, lo), hi)
    # One tile is visited at least, so that the pipeline always fills: where nothing is live, it is masked out.
    first = gl.minimum(lo, gl.cdiv(KV_LEN, BLOCK_N) - 1)
    count = gl.maximum(hi - lo, 1)
    return first, count, full_hi


@gluon.jit
def tile_at(step, tiles):
    """Return the number of the tile that is visited at a step."""
    first, count, full_hi = tiles
    return first + step


@gluon.jit
def needs_mask(step, tile, tiles):
    """Whether a tile holds pairs that are not live."""
    first, count, full_hi = tiles
    return tile >= full_hi


@gluon.jit
def hidden(number):
    """The number, as one that the compiler knows nothing of.

    It would otherwise carry the index of each key of a tile from step to step, in registers that the sums need.
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
def live_keys(b, h, q_idx, Q_LEN, KV_LEN):
    """Return the first live key of each query and how many there are: one interval, which ends at KV_LEN at most."""
    kv_lo = 0
    kv_hi = gl.minimum(q_idx + 1, KV_LEN)
    return kv_lo, gl.maximum(kv_hi - kv_lo, 0)


@gluon.jit
def weigh(score, row_shift, tile, checked, kv_lo, kv_width):
    """Turn the products of a tile into the softmax's weights, 0 where a pair is not live."""
    kv_idx = hidden(tile) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    if checked:
        score = keep_interval(score, kv_idx[None, :], kv_width[:, None])
    return gl.exp2(score * SCALE_LOG2_E - row_shift[:, None])


@gluon.jit
def differentiate(weight, grad_weight, delta):
    """Return the gradient of each score of a tile."""
    return weight * (grad_weight - delta[:, None])


@gluon.jit
def multiply(own, walked):
    """Start own @ walked.T, whose last dimension both share; the result is ready after a wait."""
    nothing = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
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
def fresh(number, turn):
    """The number, as one that the compiler takes to change from turn to turn.

    It would otherwise keep the descriptors of all parts of a tile that stays in place in registers that the sums need.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r",
        [number, turn],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


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
    """The producer warp: copies the program's queries and their output's gradients, and keeps the rings filled."""
    query_desc, grad_output_desc, key_desc, value_desc = descriptors
    own_full, key_full, key_empty, value_full, value_empty = barriers
    queries, grad_outputs, keys, values = buffers
    b, h, q_start = locate(gl.program_id(0), Q_LEN, Q_HEADS)
    tiles = key_tiles(b, h, q_start, Q_LEN, KV_LEN)
    kv_head = h
    # What is shared along a dimension has stride 0 there, and one entry in its descriptor.
    query_b, query_h = gl.where(query_stride_b == 0, 0, b), gl.where(query_stride_h == 0, 0, h)
    grad_output_b = gl.where(grad_output_stride_b == 0, 0, b)
    grad_output_h = gl.where(grad_output_stride_h == 0, 0, h)
    key_b, key_h = gl.where(key_stride_b == 0, 0, b), gl.where(key_stride_h == 0, 0, kv_head)
    value_b, value_h = gl.where(value_stride_b == 0, 0, b), gl.where(value_stride_h == 0, 0, kv_head)
    for warpgroup in gl.static_range(CONSUMERS):
        own_start = q_start + warpgroup * ROWS
        mbarrier.expect(
            own_full.index(warpgroup), query_desc.block_type.nbytes + grad_output_desc.block_type.nbytes,
        )
        tma.async_copy_global_to_shared(
            query_desc, [query_b, query_h, own_start, 0], own_full.index(warpgroup), queries.index(warpgroup),
        )
        tma.async_copy_global_to_shared(
            grad_output_desc, [grad_output_b, grad_output_h, own_start, 0], own_full.index(warpgroup),
            grad_outputs.index(warpgroup),
        )

    for step in range(0, tiles[1]):
        kv_start = tile_at(step, tiles) * BLOCK_N
        wait_free(key_empty, step, KEY_STAGES)
        key_slot = step % KEY_STAGES
        mbarrier.expect(key_full.index(key_slot), key_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            key_desc, [key_b, key_h, kv_start, 0], key_full.index(key_slot), keys.index(key_slot),
        )
        wait_free(value_empty, step, VALUE_STAGES)
        value_slot = step % VALUE_STAGES
        mbarrier.expect(value_full.index(value_slot), value_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            value_desc, [value_b, value_h, kv_start, 0], value_full.index(value_slot),
            values.index(value_slot),
        )


@gluon.jit
def consume(
    barriers, buffers,
    row_shift_ptr, delta_ptr, grad_query_ptr, grad_query_stride_b, grad_query_stride_h,
    grad_query_stride_q, Q_LEN, KV_LEN, Q_HEADS,
    WARPGROUP: gl.constexpr,
):
    """A consumer warpgroup: adds up the gradients of its ROWS queries."""
    own_full, key_full, key_empty, value_full, value_empty = barriers
    queries, grad_outputs, keys, values = buffers
    b, h, q_start = locate(gl.program_id(0), Q_LEN, Q_HEADS)
    tiles = key_tiles(b, h, q_start, Q_LEN, KV_LEN)
    row_start = q_start + WARPGROUP * ROWS
    q_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    rows_before = (b.to(gl.int64) * Q_HEADS + h) * gl.cdiv(Q_LEN, ROW_MULTIPLE) * ROW_MULTIPLE
    row_at = rows_before + q_idx
    row_shift = gl.load(row_shift_ptr + row_at)
    delta = gl.load(delta_ptr + row_at)
    kv_lo, kv_width = live_keys(b, h, q_idx, Q_LEN, KV_LEN)
    grad_query = gl.full([ROWS, QK_HEAD_DIM_ROUNDED], 0.0, gl.float32, QUERY_SUMS)
    mbarrier.wait(own_full.index(WARPGROUP), 0)

    # The first tile fills the pipeline.
    wait_filled(key_full, 0, KEY_STAGES)
    score = multiply(
        queries.index(fresh(WARPGROUP, 0)).reshape([ROWS, QK_HEAD_DIM_ROUNDED]),
        keys.index(0 % KEY_STAGES).reshape([BLOCK_N, QK_HEAD_DIM_ROUNDED]),
    )
    wait_filled(value_full, 0, VALUE_STAGES)
    grad_weight = multiply(
        grad_outputs.index(fresh(WARPGROUP, 0)).reshape([ROWS, V_HEAD_DIM_ROUNDED]),
        values.index(fresh(0, 0)).reshape([BLOCK_N, V_HEAD_DIM_ROUNDED]),
    )
    score, grad_weight = warpgroup_mma_wait(0, deps=[score, grad_weight])
    free(value_empty, 0, VALUE_STAGES)
    tile = tile_at(0, tiles)
    checked = needs_mask(0, tile, tiles)
    weight = weigh(score, row_shift, tile, checked, kv_lo, kv_width)
    grad_score = differentiate(weight, grad_weight, delta)
    operand = as_operand(grad_score, QUERY_OPERANDS)

    # Each step starts the products with this tile and the one that adds the tile before it, and computes this tile's
    # gradients while the latter run. Nothing is in flight at the end of a step: were a register operand, the assembler
    # would serialise every matrix instruction.
    for step in range(1, tiles[1]):
        wait_filled(key_full, step, KEY_STAGES)
        score = multiply(
            queries.index(fresh(WARPGROUP, step)).reshape([ROWS, QK_HEAD_DIM_ROUNDED]),
            keys.index(step % KEY_STAGES).reshape([BLOCK_N, QK_HEAD_DIM_ROUNDED]),
        )
        wait_filled(value_full, step, VALUE_STAGES)
        grad_weight = multiply(
            grad_outputs.index(fresh(WARPGROUP, step)).reshape([ROWS, V_HEAD_DIM_ROUNDED]),
            values.index(fresh(0, step)).reshape([BLOCK_N, V_HEAD_DIM_ROUNDED]),
        )
        grad_query = warpgroup_mma(
            operand, keys.index((step - 1) % KEY_STAGES).reshape([BLOCK_N, QK_HEAD_DIM_ROUNDED]), grad_query,
            is_async=True,
        )
        score = warpgroup_mma_wait(2, deps=[score])
        tile = tile_at(step, tiles)
        checked = needs_mask(step, tile, tiles)
        weight = weigh(score, row_shift, tile, checked, kv_lo, kv_width)
        grad_weight = warpgroup_mma_wait(1, deps=[grad_weight])
        free(value_empty, step, VALUE_STAGES)
        grad_score = differentiate(weight, grad_weight, delta)
        grad_query, operand = warpgroup_mma_wait(0, deps=[grad_query, operand])
        free(key_empty, step - 1, KEY_STAGES)
        operand = as_operand(grad_score, QUERY_OPERANDS)

    grad_query = warpgroup_mma(
        operand, keys.index((tiles[1] - 1) % KEY_STAGES).reshape([BLOCK_N, QK_HEAD_DIM_ROUNDED]), grad_query,
        is_async=True,
    )
    grad_query, operand = warpgroup_mma_wait(0, deps=[grad_query, operand])

    q_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUERY_SUMS))
    dim = gl.arange(0, QK_HEAD_DIM_ROUNDED, layout=gl.SliceLayout(0, QUERY_SUMS))
    grad_query_ptr += b.to(gl.int64) * grad_query_stride_b + h.to(gl.int64) * grad_query_stride_h
    gl.store(
        grad_query_ptr + q_idx[:, None] * grad_query_stride_q + dim[None, :],
        (grad_query * SM_SCALE).to(gl.bfloat16),
        mask=(q_idx < Q_LEN)[:, None],
    )


@gluon.jit
def backward_dq(
    query_desc,
    grad_output_desc,
    key_desc,
    value_desc,
    row_shift_ptr,
    delta_ptr,
    grad_query_ptr,
    query_stride_b,
    query_stride_h,
    grad_output_stride_b,
    grad_output_stride_h,
    key_stride_b,
    key_stride_h,
    value_stride_b,
    value_stride_h,
    grad_query_stride_b,
    grad_query_stride_h,
    grad_query_stride_q,
    Q_LEN,
    KV_LEN,
    Q_HEADS,
):
    """Share BLOCK_M queries of one head between 2 consumer warpgroups, which one producer warp feeds."""
    queries = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, 1, 1, ROWS, QK_HEAD_DIM_ROUNDED], query_desc.layout,
    )
    grad_outputs = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, 1, 1, ROWS, V_HEAD_DIM_ROUNDED], grad_output_desc.layout,
    )
    keys = gl.allocate_shared_memory(
        gl.bfloat16, [KEY_STAGES, 1, 1, BLOCK_N, QK_HEAD_DIM_ROUNDED], key_desc.layout,
    )
    values = gl.allocate_shared_memory(
        gl.bfloat16, [VALUE_STAGES, 1, 1, BLOCK_N, V_HEAD_DIM_ROUNDED], value_desc.layout,
    )
    # Full: the copy engine has written the bytes that the producer announced. Empty: each consumer has arrived.
    own_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    key_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER)
    key_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], BARRIER)
    value_empty = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], BARRIER)
    for warpgroup in gl.static_range(CONSUMERS):
        mbarrier.init(own_full.index(warpgroup), count=1)
    for slot in gl.static_range(KEY_STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_empty.index(slot), count=CONSUMERS)
    for slot in gl.static_range(VALUE_STAGES):
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_empty.index(slot), count=CONSUMERS)
    fence_async_shared()  # the copy engine sees the barriers
    descriptors = (query_desc, grad_output_desc, key_desc, value_desc)
    barriers = (own_full, key_full, key_empty, value_full, value_empty)
    buffers = (queries, grad_outputs, keys, values)
    producer = (
        descriptors, barriers, buffers,
        Q_LEN, KV_LEN, Q_HEADS, query_stride_b, query_stride_h, grad_output_stride_b,
        grad_output_stride_h, key_stride_b, key_stride_h, value_stride_b, value_stride_h,
    )
    consumer_0 = (
        barriers, buffers,
        row_shift_ptr, delta_ptr, grad_query_ptr, grad_query_stride_b, grad_query_stride_h,
        grad_query_stride_q, Q_LEN, KV_LEN, Q_HEADS,
        0,
    )
    consumer_1 = (
        barriers, buffers,
        row_shift_ptr, delta_ptr, grad_query_ptr, grad_query_stride_b, grad_query_stride_h,
        grad_query_stride_q, Q_LEN, KV_LEN, Q_HEADS,
        1,
    )
    gl.warp_specialize(
        [(consume, consumer_0), (consume, consumer_1), (produce, producer)],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
