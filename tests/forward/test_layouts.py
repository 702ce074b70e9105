"""Strides, head groups and head dims: every view of a tensor is read where it lies."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import Inputs, check_block_mask, check_forward, random_inputs


def causal(b, h, q, k):
    return q >= k


def draw(*size, device, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def test_views_into_longer_keys_after_a_contiguous_call(device):
    """A kernel specialised on the strides of the first call must not serve the second."""
    attention = flexgen.compile()
    whole = random_inputs(Shape(1, 2, 2, 40, 64), device, head_dim=32)
    check_forward(whole, attention=attention)
    view = Inputs(whole.query, whole.key[:, :, :48], whole.value[:, :, :48])
    check_forward(view, attention=attention)
    check_forward(Inputs(*(tensor.contiguous() for tensor in view)), attention=attention)


def test_nothing_outside_a_view_is_used(device):
    """Rows after the length and columns after the head dim hold NaN in the storage that the views look into."""
    inputs = random_inputs(Shape(1, 2, 2, 40, 70), device, head_dim=24)
    views = []
    for tensor in inputs:
        storage = torch.full((1, 2, 128, 48), float("nan"), device=device)
        views.append(storage[:, :, : tensor.shape[2], :24])
        views[-1].copy_(tensor)
    check_forward(Inputs(*views))
    check_forward(Inputs(*views), mask_mod=causal)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 40, 70, device=device)
    check_block_mask(Inputs(*views), block_mask)


def test_packed_query_key_value(device):
    batch, length, heads, head_dim = 2, 37, 2, 16
    packed = draw(batch, length, 3, heads, head_dim, device=device).permute(2, 0, 3, 1, 4)
    out = check_forward(Inputs(*packed), mask_mod=causal)
    assert out.transpose(1, 2).view(batch, length, heads * head_dim).is_contiguous()  # lies as the query does


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_last_dimension_with_a_stride(device, which):
    inputs = random_inputs(Shape(1, 2, 2, 33, 33), device)
    transposed = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    transposed[which] = transposed[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert transposed[which].stride(-1) != 1
    check_forward(Inputs(**transposed), mask_mod=causal)


def test_every_second_column_of_wider_tensors(device):
    wide = random_inputs(Shape(1, 1, 1, 20, 35), device, head_dim=32)
    check_forward(Inputs(*(tensor[..., ::2] for tensor in wide)))


def test_expanded_batch_and_heads(device):
    inputs = random_inputs(Shape(1, 1, 1, 24, 40), device)
    expanded = Inputs(*(tensor.expand(2, 3, -1, -1) for tensor in inputs))
    assert expanded.key.stride()[:2] == (0, 0)
    check_forward(expanded, lambda score, b, h, q, k: score * (1 + b) - h)


def test_reversed_axes_of_one_buffer(device):
    """Batch and heads exchanged: the batch stride is smaller than the head stride."""
    inputs = random_inputs(Shape(3, 2, 2, 18, 18), device)
    check_forward(Inputs(*(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs)))


def test_storage_offsets(device):
    storage = draw(5000, device=device)
    tensors = [storage[start : start + 1 * 2 * 20 * 16].view(1, 2, 20, 16) for start in (3, 1000, 2777)]
    check_forward(Inputs(*tensors))


@pytest.mark.parametrize("length", [1, 23])
def test_dimensions_of_size_one_with_odd_strides(device, length):
    inputs = random_inputs(Shape(1, 1, 1, length, length), device)
    odd = Inputs(*(tensor.as_strided(tensor.shape, (7, 3, 16, 1)) for tensor in inputs))
    check_forward(odd)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(80, 24), (65, 65), (128, 128), (24, 200)])
def test_rows_in_half_precision_that_start_anywhere(device, head_dim, v_head_dim):
    """Rows three elements longer than the head dim: each element is loaded by itself, also between matrix products."""
    inputs = random_inputs(
        Shape(2, 2, 1, 131, 97), device, dtype=torch.bfloat16, head_dim=head_dim, v_head_dim=v_head_dim
    )
    wide = (torch.nn.functional.pad(tensor, (1, 2), value=torch.nan) for tensor in inputs)
    check_forward(Inputs(*(tensor[..., 1:-2] for tensor in wide)), mask_mod=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bshd_layout(device, dtype):
    inputs = random_inputs(Shape(2, 4, 2, 21, 33), device, dtype=dtype, v_head_dim=24)
    swapped = (tensor.transpose(1, 2).contiguous() for tensor in inputs)
    out = flexgen.compile(mask_mod=causal, options={"layout": "bshd"})(*swapped)
    expected = flexgen.compile(mask_mod=causal)(*inputs)
    assert out.shape == (2, 21, 4, 24)
    assert torch.equal(out.transpose(1, 2), expected)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 64), (5, 37)])
def test_groups_of_query_heads(device, group, q_len, kv_len):
    inputs = random_inputs(Shape(1, 2 * group, 2, q_len, kv_len), device)
    check_forward(inputs, lambda score, b, h, q, k: score + 0.1 * h, lambda b, h, q, k: k <= q + 40 + h)


def test_all_query_heads_share_one_key_head(device):
    check_forward(random_inputs(Shape(2, 12, 1, 3, 50), device), mask_mod=causal)


@pytest.mark.parametrize("group", [1, 3])
def test_keys_of_one_batch_serve_all_queries(device, group):
    inputs = random_inputs(Shape(3, 2 * group, 2, 19, 45), device)
    shared = Inputs(inputs.query, inputs.key[:1], inputs.value[:1])
    check_forward(shared, lambda score, b, h, q, k: score + 0.3 * b, lambda b, h, q, k: k <= q + 10 * b)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(32, 80), (80, 32)])
def test_value_rows_come_out_exactly_where_each_query_sees_one_key(device, head_dim, v_head_dim):
    inputs = random_inputs(Shape(1, 2, 2, 40, 40), device, head_dim=head_dim, v_head_dim=v_head_dim)
    out = check_forward(inputs, mask_mod=lambda b, h, q, k: q == k)
    assert out.shape == (1, 2, 40, v_head_dim)
    assert torch.equal(out, inputs.value)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(16, 48), (48, 16), (64, 1), (1, 64), (24, 40), (128, 192)])
def test_value_head_dim_differs(device, head_dim, v_head_dim):
    inputs = random_inputs(Shape(1, 1, 1, 40, 40), device, head_dim=head_dim, v_head_dim=v_head_dim)
    check_forward(inputs, mask_mod=causal)


@pytest.mark.parametrize("head_dim", [1, 2, 3, 7, 8, 15, 17, 31, 33, 48, 65, 72, 96, 100, 127, 192, 256, 257, 384, 512])
def test_head_dims_from_1_to_512(device, head_dim):
    check_forward(random_inputs(Shape(1, 1, 1, 17, 19), device, head_dim=head_dim), mask_mod=causal)


def test_output_is_dense_and_in_the_shape_of_the_query(device):
    out = flexgen.compile()(*random_inputs(Shape(2, 3, 3, 5, 7), device))
    assert out.shape == (2, 3, 5, 16)
    assert out.is_contiguous()
    assert out.device.type == device.type


def big_key(rows, row_stride, dtype=torch.bfloat16):
    """Return a meta key [1, 1, rows, 128] whose rows lie `row_stride` elements apart."""
    return torch.empty_strided((1, 1, rows, 128), (row_stride, row_stride, row_stride, 1), dtype=dtype, device="meta")


def source_for(key, mask_mod=None):
    query = torch.empty(1, 1, 128, 128, dtype=key.dtype, device="meta")
    attention = flexgen.compile(mask_mod=mask_mod, options={"BACKEND": "TRITON"})
    return attention.lower(query, key, key, target="sm_90").source["forward"]


def test_offsets_are_64_bit_exactly_where_a_tensor_needs_them():
    far, near = source_for(big_key(24000, 700 * 128)), source_for(big_key(24000, 128))
    assert "int64" in far
    assert far != near


def test_offsets_into_a_large_captured_table_are_64_bit():
    def source(side):
        table = torch.empty(1, side, side, dtype=torch.bool, device="meta")
        return source_for(big_key(24000, 128), lambda b, h, q, k: table[b, q, k])

    large, small = source(46400), source(464)
    assert "int64" in large
    assert large != small


@pytest.mark.gpu
def test_keys_whose_last_rows_lie_past_two_to_the_31():
    device = torch.device("cuda")
    batch, length, head_dim = 700, 24000, 128
    buffer = torch.zeros(length, batch, head_dim, dtype=torch.bfloat16, device=device)
    inputs = random_inputs(Shape(1, 1, 1, 64, length), device, dtype=torch.bfloat16, head_dim=head_dim)
    last = buffer.view(length, batch, 1, head_dim).permute(1, 2, 0, 3)[-1:]
    last.copy_(inputs.key)
    check_forward(Inputs(inputs.query, last, inputs.value), mask_mod=lambda b, h, q, k: k >= 23000 + q)


@pytest.mark.gpu
def test_captured_table_of_more_than_two_to_the_31_entries():
    device = torch.device("cuda")
    side, rows = 46400, 64
    table = torch.zeros(1, side, side, dtype=torch.bool, device=device)
    table[:, :, ::3] = True
    table[:, -rows:, :7] = True
    inputs = random_inputs(Shape(1, 1, 1, rows, side), device, dtype=torch.bfloat16, head_dim=64)
    first = side - rows
    last_rows = table[:, first:].clone()
    out = flexgen.compile(mask_mod=lambda b, h, q, k: table[b, q + first, k])(*inputs)
    expected = flexgen.compile(mask_mod=lambda b, h, q, k: last_rows[b, q, k])(*inputs)
    assert torch.equal(out, expected)
