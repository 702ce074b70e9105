"""Backward with a caller's block mask: only listed blocks count, by rows for dQ and by columns for dK and dV."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import flexgen
from tests.backward.run import check_backward, draw, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import square


def causal(b, h, q, k):
    return q >= k


def window_and_sinks(b, h, q, k):
    return (k <= q) & ((q - k <= 31) | (k < 4))


def blocks(mask, shape, size, device, *, per_head=False):
    heads = shape.Hq if per_head else 1
    return flexgen.create_block_mask(mask, 1, heads, shape.Lq, shape.Lk, device=device, BLOCK_SIZE=size)


def softcapped(score, b, h, q, k):
    return 4.0 * torch.tanh(score / 4.0) + 0.05 * (k - q)


@pytest.mark.parametrize("size", [16, (32, 64), (64, 16), (24, 40), 128])
@pytest.mark.parametrize("mask", [causal, window_and_sinks])
def test_sizes_of_blocks(device, size, mask):
    shape = Shape(1, 2, 1, 70, 90)
    check_backward(training_inputs(shape, device), softcapped, block_mask=blocks(mask, shape, size, device))


def test_all_blocks_partial_gives_what_full_blocks_give(device):
    """The same mask with full blocks listed apart and without."""
    shape = Shape(2, 4, 1, 128, 128)
    inputs = training_inputs(shape, device)
    listed = blocks(window_and_sinks, shape, 32, device)
    dense = window_and_sinks(0, 0, torch.arange(128)[:, None], torch.arange(128))
    visited = dense.view(4, 32, 4, 32).any(3).any(1)
    partial = BlockMask.from_kv_blocks(*ordered(visited), BLOCK_SIZE=32, mask_mod=window_and_sinks)
    partial = partial.to(device)
    for one, other in zip(
        check_backward(inputs, block_mask=listed), check_backward(inputs, block_mask=partial), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def ordered(visited):
    """Return counts and indices [1, 1, ...] of the blocks that are set in a table [rows, columns]."""
    order = torch.argsort(visited.int(), dim=-1, descending=True, stable=True).to(torch.int32)
    return visited.sum(-1, dtype=torch.int32)[None, None], order[None, None]


@pytest.mark.parametrize("size", [16, (24, 40)])
@pytest.mark.parametrize("with_columns", [True, False])
def test_lists_by_columns_given_or_derived(device, size, with_columns):
    shape = Shape(2, 2, 2, 70, 90)
    made = blocks(window_and_sinks, shape, size, device)
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    options = {"BLOCK_SIZE": made.BLOCK_SIZE, "mask_mod": window_and_sinks, "seq_lengths": (70, 90)}
    table = BlockMask.from_kv_blocks(*lists, **options, compute_q_blocks=with_columns)
    assert (table.q_indices is None) is not with_columns
    check_backward(training_inputs(shape, device), block_mask=table)


def test_lists_that_differ_between_heads_of_a_group(device):
    shape = Shape(2, 6, 2, 48, 64)
    live = torch.tensor([True, False, True, True, True, False], device=device)
    mask = lambda b, h, q, k: live[h] & (q >= k - 8 * h)  # noqa: E731
    bias = draw(6, 64, device=device)
    score = learned(lambda t: lambda score, b, h, q, k: score + t[h, k], bias)
    (*_, grad) = check_backward(
        training_inputs(shape, device), score, block_mask=blocks(mask, shape, 16, device, per_head=True)
    )
    assert not grad[~live].any()


def test_rows_and_columns_without_a_block(device):
    shape = square(96)
    mask = lambda b, h, q, k: (q // 32 == 1) & (k // 32 != 1)  # noqa: E731
    query, key, value = check_backward(
        training_inputs(shape, device), block_mask=blocks(mask, shape, 32, device), use_lse=True
    )
    assert not query[:, :, :32].any()
    assert not key[:, :, 32:64].any()
    assert not value[:, :, 32:64].any()


def test_blocks_the_lists_leave_out_get_no_gradient(device):
    """The lists say what counts, whatever mask_mod would say there."""
    counts = torch.tensor([[[1, 1, 2]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 2, 0]]]], dtype=torch.int32, device=device)
    table = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(48, 48))
    check_backward(training_inputs(square(48), device), block_mask=table)


def test_no_mask_of_torch(device):
    """What torch's flex_attention passes for no block mask: one block, longer than any data."""
    inputs = training_inputs(square(37), device)
    out = flexgen.flex_attention(*inputs, score_mod=softcapped)
    expected = torch.autograd.grad(flexgen.compile(softcapped)(*inputs).sum(), list(inputs))
    for one, other in zip(torch.autograd.grad(out.sum(), list(inputs)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"BLOCK_M1": 16, "BLOCK_N2": 16}])
def test_documents(device, options):
    """The mask is no interval: forward derives a table, and tiles of backward skip or check blocks alike."""
    ids = torch.tensor([0] * 20 + [1] * 33 + [2] * 5 + [0] * 12, device=device)
    mask = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)  # noqa: E731
    relative = draw(139, device=device)
    score = learned(lambda t: lambda score, b, h, q, k: score + t[q - k + 69], relative)
    check_backward(training_inputs(Shape(1, 4, 2, 70, 70), device), score, mask, options=options)


def test_derived_table_given_by_the_caller(device):
    ids = torch.tensor([0] * 20 + [1] * 30 + [2] * 20, device=device)
    mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    inputs = training_inputs(square(70), device)
    attention = flexgen.compile(None, mask)
    out = attention(*inputs, block_table=attention.block_table(*inputs))
    expected = torch.autograd.grad(attention(*inputs).sum(), list(inputs))
    for one, other in zip(torch.autograd.grad(out.sum(), list(inputs)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
