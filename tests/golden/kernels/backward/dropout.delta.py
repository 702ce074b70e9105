"""Fused attention, backward, row statistics, for sm_90. Written by flexgen."""

import triton
import triton.language as tl

BLOCK_M = tl.constexpr(128)
V_HEAD_DIM = tl.constexpr(64)
V_HEAD_DIM_ROUNDED = tl.constexpr(64)


@triton.jit
def backward_delta(
    output_ptr,
    grad_output_ptr,
    logsumexp_ptr,
    delta_ptr,
    row_shift_ptr,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    grad_output_stride_b,
    grad_output_stride_h,
    grad_output_stride_q,
    Q_LEN,
    Q_HEADS,
):
    """delta = sum(output * grad_output) of each row, less the gradient of its logsumexp.

    A softmax's backward is weight * (grad_weight - delta). Rows without a live key get logsumexp +inf in
    `row_shift`, so that their recomputed weights exp(score - row_shift) are 0.
    """
    tiles_per_head = tl.cdiv(Q_LEN, BLOCK_M)
    row_tile = tl.program_id(0) % tiles_per_head
    b = (tl.program_id(0) // tiles_per_head // Q_HEADS).to(tl.int64)
    h = (tl.program_id(0) // tiles_per_head % Q_HEADS).to(tl.int64)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = row < Q_LEN
    v_dim = tl.arange(0, V_HEAD_DIM_ROUNDED)
    exists = row_exists[:, None] & (v_dim < V_HEAD_DIM)[None, :]

    output_ptr += b * output_stride_b + h * output_stride_h
    grad_output_ptr += b * grad_output_stride_b + h * grad_output_stride_h
    output = tl.load(output_ptr + row[:, None] * output_stride_q + v_dim[None, :], mask=exists, other=0.0)
    grad_output = tl.load(
        grad_output_ptr + row[:, None] * grad_output_stride_q + v_dim[None, :],
        mask=exists,
        other=0.0,
    )
    delta = tl.sum(output.to(tl.float32) * grad_output.to(tl.float32), 1)

    aux_offset = (b * Q_HEADS + h) * Q_LEN + row
    logsumexp = tl.load(logsumexp_ptr + aux_offset, mask=row_exists, other=float("-inf"))
    row_is_empty = logsumexp == float("-inf")
    tl.store(delta_ptr + aux_offset, delta, mask=row_exists)
    tl.store(row_shift_ptr + aux_offset, tl.where(row_is_empty, float("inf"), logsumexp), mask=row_exists)
