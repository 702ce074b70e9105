"""Shapes, dtypes, lengths, strides and layouts of query, key and value."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, draw, leaf, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import Inputs, square

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILES = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)


def causal(b, h, q, k):
    return q >= k


def softcapped(score, b, h, q, k):
    return 4.0 * torch.tanh(score / 4.0) + 0.05 * (k - q)


def biased(table):
    return lambda score, b, h, q, k: score + table[h, k]


# Dtypes and head dims.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(16, 16), (16, 48), (80, 32), (20, 36)])
def test_dtypes_and_head_dims(device, dtype, head_dim, v_head_dim):
    """Values have other extents than queries and keys, narrower and wider."""
    inputs = training_inputs(Shape(1, 2, 1, 40, 40), device, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    grads = check_backward(inputs, softcapped, causal)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(32, 80), (80, 32)])
def test_a_query_that_sees_one_key_gives_values_their_gradient(device, head_dim, v_head_dim):
    inputs = training_inputs(square(24), device, head_dim=head_dim, v_head_dim=v_head_dim)
    grads = check_backward(inputs, None, lambda b, h, q, k: q == k)
    assert float(grads[0].abs().max()) < 1e-5
    assert float(grads[1].abs().max()) < 1e-5


def test_float64_in_the_interpreter():
    device = torch.device("cpu")
    inputs = training_inputs(Shape(1, 2, 1, 35, 53), device, dtype=torch.float64, v_head_dim=24)
    table = draw(2, 53, dtype=torch.float64)
    check_backward(inputs, learned(biased, table), causal, use_lse=True, scale=0.3)


# Heads and batch.


@pytest.mark.parametrize("group", [2, 3, 5, 6])
def test_groups_of_query_heads_share_a_key_head(device, group):
    shape = Shape(2, 2 * group, 2, 21, 34)
    table = draw(2 * group, 34, device=device)
    check_backward(training_inputs(shape, device), learned(biased, table), causal)


@pytest.mark.parametrize("q_len", [3, 40])
def test_keys_of_one_batch_are_shared(device, q_len):
    query = draw(3, 4, q_len, 16, device=device)
    key, value = draw(1, 2, 40, 16, seed=1, device=device), draw(1, 2, 40, 24, seed=2, device=device)
    grads = check_backward(Inputs(query, key, value), softcapped, causal)
    assert grads[1].shape == key.shape
    assert grads[2].shape == value.shape


def test_key_is_shared_by_the_batch_and_value_is_not(device):
    query = draw(2, 2, 20, 16, device=device)
    key, value = draw(1, 2, 20, 16, seed=1, device=device), draw(1, 2, 20, 16, seed=2, device=device)
    check_backward(Inputs(query, key.expand(2, -1, -1, -1).detach().requires_grad_(), value.expand(2, -1, -1, -1)))


# Lengths.


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 67), (67, 1), (37, 41), (16, 130), (130, 16), (128, 128)])
def test_lengths(device, q_len, kv_len):
    offset = kv_len - q_len
    inputs = training_inputs(Shape(1, 2, 1, q_len, kv_len), device)
    check_backward(inputs, softcapped, lambda b, h, q, k: q + offset >= k, use_lse=True)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 8, 8), (1, 0, 8), (1, 8, 0), (1, 0, 0)])
def test_nothing_to_attend_has_gradients_of_zero(device, batch, q_len, kv_len):
    table = draw(2, 8, device=device)
    inputs = training_inputs(Shape(batch, 2, 2, q_len, kv_len), device)
    out = flexgen.compile(biased(table), causal)(*inputs)
    grads = torch.autograd.grad(out.sum(), [*inputs, table])
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (*inputs, table)]
    assert all(not grad.any() for grad in grads)


# Strides.


def test_packed_query_key_value(device):
    """One buffer [B, S, 3, H, D], of which query, key and value are views."""
    packed = draw(2, 40, 3, 2, 16, device=device)
    views = packed.permute(2, 0, 3, 1, 4).unbind()
    grads = check_backward(Inputs(*views), softcapped, causal)
    (whole,) = torch.autograd.grad(flexgen.compile(softcapped, causal)(*views).sum(), packed)
    assert whole.shape == packed.shape
    assert len(grads) == 3


def test_last_dimension_is_strided(device):
    query, key, value = (draw(1, 2, 16, 40, seed=seed, device=device) for seed in range(3))
    inputs = Inputs(query.transpose(2, 3), key.transpose(2, 3), value.transpose(2, 3))
    check_backward(inputs, softcapped, causal)


def test_tensors_are_expanded(device):
    query = draw(1, 1, 40, 16, device=device).expand(2, 2, -1, -1)
    key = draw(2, 2, 1, 16, seed=1, device=device).expand(-1, -1, 40, -1)
    value = draw(2, 2, 40, 1, seed=2, device=device).expand(-1, -1, -1, 16)
    check_backward(Inputs(query, key, value), softcapped, causal)


def test_keys_are_a_slice_of_a_longer_buffer(device):
    """Strides of a slice, after a call with contiguous tensors of the same rank."""
    attention = flexgen.compile(None, causal)
    check_backward(training_inputs(square(48), device), None, causal, attention=attention)
    buffers = [draw(1, 1, 64, 16, seed=seed, device=device) for seed in range(2)]
    query = draw(1, 1, 48, 16, seed=5, device=device)
    check_backward(Inputs(query, *(b[:, :, :48] for b in buffers)), None, causal, attention=attention)
    zeros = [leaf(torch.zeros(1, 1, 64, 64, device=device)) for _ in range(3)]
    inputs = [zeros[0], *(each[:, :, :48] for each in zeros[1:])]
    grads = torch.autograd.grad(flexgen.compile()(*inputs).sum(), zeros)
    assert not grads[0].any()
    assert not grads[1].any()


@pytest.mark.parametrize("how", ["expanded", "transposed", "strided"])
def test_gradient_of_the_output_has_any_strides(device, how):
    inputs = training_inputs(Shape(2, 2, 2, 40, 40), device)
    out = flexgen.compile(softcapped, causal)(*inputs)
    given = {
        "expanded": torch.full((), 0.5, device=device).expand(out.shape),
        "transposed": torch.randn(2, 2, 16, 40, device=device).transpose(2, 3),
        "strided": torch.randn(2, 2, 40, 32, device=device)[..., ::2],
    }[how]
    strided = torch.autograd.grad(out, list(inputs), given, retain_graph=True)
    plain = torch.autograd.grad(out, list(inputs), given.contiguous())
    for one, other in zip(strided, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (1, 1)])
def test_heads_inside_rows(device, heads, kv_heads):
    query = draw(2, 20, heads, 16, device=device)
    key, value = draw(2, 33, kv_heads, 16, seed=1, device=device), draw(2, 33, kv_heads, 24, seed=2, device=device)
    grads = check_backward(Inputs(query, key, value), softcapped, causal, options={"layout": "bshd"}, use_lse=True)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


# Scale.


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.7, 1.0])
@pytest.mark.parametrize("score", [None, softcapped])
def test_scales(device, scale, score):
    check_backward(training_inputs(square(33), device), score, causal, scale=scale, options=TILES)


def test_scales_that_change_from_call_to_call(device):
    inputs = training_inputs(square(33), device)
    for score in (None, softcapped):
        attention = flexgen.compile(score, causal)
        for scale in (0.3, -0.2, 0.0, 1.5, 0.11):
            check_backward(inputs, score, causal, scale=scale, attention=attention)


# What is wanted.


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 2), ()])
@pytest.mark.parametrize("with_table", [True, False])
def test_only_some_gradients_are_wanted(device, wanted, with_table):
    if not wanted and not with_table:
        return
    shape = Shape(1, 4, 2, 37, 29)
    inputs = training_inputs(shape, device)
    for at, tensor in enumerate(inputs):
        tensor.requires_grad_(at in wanted)
    score = learned(biased, draw(4, 29, device=device)) if with_table else softcapped
    assert len(check_backward(inputs, score, causal, use_lse=True)) == len(wanted) + with_table
