"""Fused attention, forward, for sm_90. Written by flexgen.

score_mod    none: softmax of scaled products
mask_mod     two_windows
backend      Gluon, one warpgroup that issues its own copies   because: a row visits about 158 keys: small
                 programs waste few of them (measured on H200)
tile         64 query rows x 64 keys, 2 stages of keys, 1 of values, 66560 bytes
keys         closed form: mask is a union of 2 intervals in kv_idx: [q_idx - 539, q_idx - 460) and [q_idx -
                 39, q_idx + 40)
             [q_idx - 539, q_idx - 460)
             [q_idx - 39, q_idx + 40)
mask         mask_mod, on tiles that are not full
rows         head after head   because: rows are alike in length
programs     one for each tile of rows   because: several programs share a multiprocessor
rows safe    yes   because: kv_idx == q_idx always passes the mask, given Q_LEN <= KV_LEN
flags        KV_TAIL=True, SAFE_HEAD_DIM=True, FOLD_SCALE=True, FAST_TANH=False, OUTPUT_LOGSUMEXP=False,
                 OUTPUT_MAX=False
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
BLOCK_M = gl.constexpr(64)  # query rows of a program
ROWS = gl.constexpr(64)  # query rows of a program
BLOCK_N = gl.constexpr(64)  # keys of a tile
KEY_STAGES = gl.constexpr(2)  # key tiles in shared memory
VALUE_STAGES = gl.constexpr(1)  # value tiles in shared memory
QK_HEAD_DIM_ROUNDED = gl.constexpr(128)
V_HEAD_DIM_ROUNDED = gl.constexpr(128)
WEIGHT_SCALE = gl.constexpr(0.12751743082459868)  # log2(e) times the softmax scale; in base 2
ROW_MAX_FLOOR = gl.constexpr(-1e+38)  # below any score; finite when scaled

# Each warp of a warpgroup holds 16 rows in registers: scores, the accumulator, and weights as an operand.
SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
OUTPUTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUTPUTS.value, k_width=2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def mask_mod(b, h, q_idx, kv_idx):
    """two_windows: the mask of one (query, key) pair; indices broadcast to the tile."""
    # return (abs(q_idx - kv_idx) < 40) | (abs(q_idx - kv_idx - 500) < 40)
    difference = q_idx - kv_idx
    return (gl.abs(difference) < 40) | (gl.abs(difference - 500) < 40)


@gluon.jit
def locate(row_tile, Q_LEN, Q_HEADS):
    """Return batch, head and first query of a row tile."""
    tiles_per_head = gl.cdiv(Q_LEN, BLOCK_M)
    q_tile = row_tile % tiles_per_head
    batch_head = row_tile // tiles_per_head
    return batch_head // Q_HEADS, batch_head % Q_HEADS, q_tile * BLOCK_M


@gluon.jit
def key_tiles(b, h, q_start, Q_LEN, KV_LEN):
    """Return which tiles of BLOCK_N keys a row tile visits and which need no mask."""
    q_lo = q_start
    q_hi = gl.minimum(q_start + BLOCK_M, Q_LEN) - 1
    # [q_idx - 539, q_idx - 460)
    lo_0 = gl.minimum(gl.maximum(q_lo - 539, 0), KV_LEN) // BLOCK_N
    hi_0 = gl.cdiv(gl.minimum(gl.maximum(q_hi - 460, 0), KV_LEN), BLOCK_N)
    full_lo_0 = gl.cdiv(gl.minimum(gl.maximum(q_hi - 539, 0), KV_LEN), BLOCK_N)
    full_hi_0 = gl.minimum(gl.maximum(q_lo - 460, 0), KV_LEN) // BLOCK_N
    # [q_idx - 39, q_idx + 40)
    lo_1 = gl.minimum(gl.maximum(q_lo - 39, 0), KV_LEN) // BLOCK_N
    hi_1 = gl.cdiv(gl.minimum(q_hi + 40, KV_LEN), BLOCK_N)
    full_lo_1 = gl.cdiv(gl.minimum(gl.maximum(q_hi - 39, 0), KV_LEN), BLOCK_N)
    full_hi_1 = gl.minimum(q_lo + 40, KV_LEN) // BLOCK_N
    # Visit each tile once: a segment starts where the ones before it have ended.
    hi_0 = gl.maximum(hi_0, lo_0)
    full_lo_0 = gl.minimum(gl.maximum(full_lo_0, lo_0), hi_0)
    full_hi_0 = gl.minimum(gl.maximum(full_hi_0, full_lo_0), hi_0)
    lo_1 = gl.maximum(lo_1, hi_0)
    hi_1 = gl.maximum(hi_1, lo_1)
    full_lo_1 = gl.minimum(gl.maximum(full_lo_1, lo_1), hi_1)
    full_hi_1 = gl.minimum(gl.maximum(full_hi_1, full_lo_1), hi_1)
    visited = hi_0 - lo_0 + hi_1 - lo_1
    # One tile is visited at least, so that the pipeline always fills: where no key is live, it is masked out.
    first = gl.minimum(lo_0, gl.cdiv(KV_LEN, BLOCK_N) - 1)
    count = gl.maximum(visited, 1)
    gap_0 = hi_0
    width_0 = gl.where(visited == 0, 0, lo_1 - hi_0)
    return first, count, gap_0, width_0, full_lo_0, full_hi_0, full_lo_1, full_hi_1


@gluon.jit
def tile_at(step, tiles):
    """Return the number of the key tile that is visited at a step, leaving out the gaps."""
    first, count, gap_0, width_0, full_lo_0, full_hi_0, full_lo_1, full_hi_1 = tiles
    tile = first + step
    tile += gl.where(tile >= gap_0, width_0, 0)
    return tile


@gluon.jit
def needs_mask(step, tile, tiles):
    """Whether a key tile holds keys that are not live for each query."""
    first, count, gap_0, width_0, full_lo_0, full_hi_0, full_lo_1, full_hi_1 = tiles
    return (((tile >= full_lo_0) & (tile < full_hi_0)) | ((tile >= full_lo_1) & (tile < full_hi_1))) == 0


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
    output_ptr, output_stride_b, output_stride_h, output_stride_q, Q_LEN, Q_HEADS,
):
    """Divide by the row sums and write a warpgroup's rows."""
    batch = b.to(gl.int64)
    head = h.to(gl.int64)
    row = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUTS))
    v_dim = gl.arange(0, V_HEAD_DIM_ROUNDED, layout=gl.SliceLayout(0, OUTPUTS))
    inverse = 1.0 / row_sum
    output = rescale(acc, inverse)
    output_ptr += batch * output_stride_b + head * output_stride_h
    gl.store(
        output_ptr + row[:, None] * output_stride_q + v_dim[None, :],
        output.to(gl.bfloat16),
        mask=(row < Q_LEN)[:, None],
    )


@gluon.jit
def start_copy(desc, b, h, tile, step, full, ring, wanted, SLOTS: gl.constexpr):
    """Copy the key or value tile of a step into its slot of the ring, if it is wanted."""
    slot = step % SLOTS
    mbarrier.expect(full.index(slot), desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        desc, [b, h, tile * BLOCK_N, 0], full.index(slot), ring.index(slot),
        pred=wanted,
    )


@gluon.jit
def wait_for(full, step, SLOTS: gl.constexpr):
    """Wait until the tile of a step is there: a slot's parity flips each time it is filled."""
    mbarrier.wait(full.index(step % SLOTS), (step // SLOTS) & 1)


@gluon.jit
def forward(
    query_desc,
    key_desc,
    value_desc,
    output_ptr,
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
):
    """Compute a tile of BLOCK_M query rows of one head with one warpgroup, which issues its own copies."""
    query_tile = gl.allocate_shared_memory(gl.bfloat16, [1, 1, ROWS, QK_HEAD_DIM_ROUNDED], query_desc.layout)
    keys = gl.allocate_shared_memory(
        gl.bfloat16, [KEY_STAGES, 1, 1, BLOCK_N, QK_HEAD_DIM_ROUNDED], key_desc.layout,
    )
    values = gl.allocate_shared_memory(
        gl.bfloat16, [VALUE_STAGES, 1, 1, BLOCK_N, V_HEAD_DIM_ROUNDED], value_desc.layout,
    )
    query_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    key_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], BARRIER)
    mbarrier.init(query_full, count=1)
    for slot in gl.static_range(KEY_STAGES):
        mbarrier.init(key_full.index(slot), count=1)
    for slot in gl.static_range(VALUE_STAGES):
        mbarrier.init(value_full.index(slot), count=1)
    fence_async_shared()  # the copy engine sees the barriers

    row_tile = gl.program_id(0)
    b, h, q_start = locate(row_tile, Q_LEN, Q_HEADS)
    tiles = key_tiles(b, h, q_start, Q_LEN, KV_LEN)
    count = tiles[1]
    row_start = q_start
    q_idx = row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    kv_head = h
    # What is shared along a dimension has stride 0 there, and one entry in its descriptor.
    query_b, query_h = gl.where(query_stride_b == 0, 0, b), gl.where(query_stride_h == 0, 0, h)
    key_b, key_h = gl.where(key_stride_b == 0, 0, b), gl.where(key_stride_h == 0, 0, kv_head)
    value_b, value_h = gl.where(value_stride_b == 0, 0, b), gl.where(value_stride_h == 0, 0, kv_head)

    mbarrier.expect(query_full, query_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(query_desc, [query_b, query_h, q_start, 0], query_full, query_tile)
    for step in gl.static_range(2):
        tile = tile_at(step, tiles)
        if step < KEY_STAGES:
            start_copy(key_desc, key_b, key_h, tile, step, key_full, keys, step < count, KEY_STAGES)
        if step < VALUE_STAGES:
            start_copy(
                value_desc, value_b, value_h, tile, step, value_full, values, step < count, VALUE_STAGES,
            )

    query = query_tile.reshape([ROWS, QK_HEAD_DIM_ROUNDED])
    row_max = gl.full([ROWS], ROW_MAX_FLOOR, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.full([ROWS, V_HEAD_DIM_ROUNDED], 0.0, gl.float32, OUTPUTS)
    mbarrier.wait(query_full, 0)

    # The first key tile fills the pipeline. A slot is filled again once the products that read it are done.
    wait_for(key_full, 0, KEY_STAGES)
    score = multiply(query, keys.index(0))
    score = warpgroup_mma_wait(0, deps=[score])
    ahead = tile_at(KEY_STAGES, tiles)
    start_copy(key_desc, key_b, key_h, ahead, KEY_STAGES, key_full, keys, count > KEY_STAGES, KEY_STAGES)
    tile = tile_at(0, tiles)
    checked = needs_mask(0, tile, tiles)
    score = finish_scores(score, tile, checked, q_idx, b, h, KV_LEN)
    weight, alpha, row_max, row_sum = softmax(score, row_max, row_sum)
    operand = as_operand(weight)

    # Each step starts the products with this key tile and with the value tile before it, and computes this tile's
    # weights while the latter run. Nothing is in flight at the end of a step: were a register operand, the
    # assembler would serialise every matrix instruction.
    for step in range(1, count):
        before = step - 1
        wait_for(key_full, step, KEY_STAGES)
        score = multiply(query, keys.index(step % KEY_STAGES))
        wait_for(value_full, before, VALUE_STAGES)
        acc = accumulate(operand, values.index(before % VALUE_STAGES), acc)
        score = warpgroup_mma_wait(1, deps=[score])
        ahead = tile_at(step + KEY_STAGES, tiles)
        start_copy(key_desc, key_b, key_h, ahead, step, key_full, keys, step + KEY_STAGES < count, KEY_STAGES)
        tile = tile_at(step, tiles)
        checked = needs_mask(step, tile, tiles)
        score = finish_scores(score, tile, checked, q_idx, b, h, KV_LEN)
        weight, alpha, row_max, row_sum = softmax(score, row_max, row_sum)
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        ahead = tile_at(before + VALUE_STAGES, tiles)
        start_copy(
            value_desc, value_b, value_h, ahead, before, value_full, values, before + VALUE_STAGES < count,
            VALUE_STAGES,
        )
        acc = rescale(acc, alpha)
        operand = as_operand(weight)

    last = count - 1
    wait_for(value_full, last, VALUE_STAGES)
    acc = accumulate(operand, values.index(last % VALUE_STAGES), acc)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    store_rows(
        acc, row_max, row_sum, b, h, row_start, output_ptr, output_stride_b, output_stride_h, output_stride_q,
        Q_LEN, Q_HEADS,
    )
