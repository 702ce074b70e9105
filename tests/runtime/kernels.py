"""Texts of kernels that several tests use; BLOCK is the size of every tile."""

from __future__ import annotations

ADD = """
BLOCK = tl.constexpr(16)


@triton.jit
def add(left, right, out, length):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < length
    total = tl.load(left + offset, mask=inside) + tl.load(right + offset, mask=inside)
    tl.store(out + offset, total, mask=inside)
"""

# Copies a matrix through tensor descriptors that the device makes.
DESCRIPTOR_COPY = """
BLOCK = tl.constexpr(16)


@triton.jit
def copy(source, target, rows, columns):
    read = tl.make_tensor_descriptor(source, shape=[rows, columns], strides=[columns, 1], block_shape=[BLOCK, BLOCK])
    write = tl.make_tensor_descriptor(target, shape=[rows, columns], strides=[columns, 1], block_shape=[BLOCK, BLOCK])
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    write.store([row, column], read.load([row, column]))
"""

# Attention with a causal mask, online softmax and, where SUBTILED, a rescale on two halves of the columns.
ATTENTION = """
BLOCK = tl.constexpr(16)
HEAD_DIM = tl.constexpr(16)
SUBTILED = tl.constexpr({subtiled})


@triton.jit
def mask_mod(q_idx, kv_idx):
    return kv_idx <= q_idx


@triton.jit
def rescale(acc, alpha):
    if SUBTILED:
        halves = acc.reshape([BLOCK, 2, HEAD_DIM // 2]).permute(0, 2, 1)
        left, right = halves.split()
        return tl.join(left * alpha[:, None], right * alpha[:, None]).permute(0, 2, 1).reshape([BLOCK, HEAD_DIM])
    else:
        return acc * alpha[:, None]


@triton.jit(do_not_specialize=["length", "scale"])
def attention(query, key, value, out, stride_q, stride_k, stride_v, scale, length):
    q_start = tl.program_id(0) * BLOCK
    q_idx = q_start + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(query + q_idx * stride_q + column, mask=q_idx < length, other=0.0)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for kv_start in tl.range(0, min(length, q_start + BLOCK), BLOCK, num_stages=2):
        kv_row = kv_start + tl.arange(0, BLOCK)[:, None]
        kv_idx = kv_start + tl.arange(0, BLOCK)[None, :]
        k = tl.load(key + kv_row * stride_k + column, mask=kv_row < length, other=0.0)
        v = tl.load(value + kv_row * stride_v + column, mask=kv_row < length, other=0.0)
        score = tl.dot(q, k.T, input_precision="ieee") * scale
        score = tl.where(mask_mod(q_idx, kv_idx) & (kv_idx < length), score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        alpha = tl.exp(row_max - new_max)
        p = tl.exp(score - new_max[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, rescale(acc, alpha), input_precision="ieee")
        row_max = new_max
    tl.store(out + q_idx * HEAD_DIM + column, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=q_idx < length)
"""

ATTENTION_TYPES = ("*bf16", "*bf16", "*bf16", "*bf16", "i64", "i64", "i64", "fp32", "i32")
