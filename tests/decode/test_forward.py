"""Decode kernels against float64: groups, splits, masks, outputs, and the inputs that broke other systems."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, check_forward, random_inputs
from tests.reference import dense_attention

SPLIT = {"SPLIT_KV": 3, "BLOCK_N": 16}


def softcap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def window(b, h, q_idx, kv_idx):
    distance = q_idx + 90 - kv_idx
    return (distance >= 0) & (distance < 40)


def sinks_and_window(b, h, q_idx, kv_idx):
    return window(b, h, q_idx, kv_idx) | (kv_idx < 4)


def every_third(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx) % 3 == 0


def some_heads(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx + 20 * h) & (h != 1)


def serves(attention: flexgen.Attention, inputs) -> str:
    return next(d.value for d in attention.lower(*inputs, target="interpret").plan.decisions if d.name == "BACKEND")


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("queries", [1, 5])
def test_heads_of_any_group_share_a_tile(group, queries, device):
    inputs = random_inputs(Shape(2, 2 * group, 2, queries, 70), device)
    attention = flexgen.compile(softcap, window, SPLIT)
    assert serves(attention, inputs) == "TRITON_DECODE"
    check_forward(inputs, softcap, window, attention=attention)


@pytest.mark.parametrize("queries", range(1, 17))
def test_any_number_of_queries_up_to_16(queries, device):
    inputs = random_inputs(Shape(2, 6, 2, queries, 70), device)
    attention = flexgen.compile(softcap, sinks_and_window, SPLIT)
    assert serves(attention, inputs) == "TRITON_DECODE"
    check_forward(inputs, softcap, sinks_and_window, attention=attention)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("mask", [None, window, sinks_and_window, every_third, some_heads])
def test_any_number_of_splits_gives_the_same(splits, mask, device):
    inputs = random_inputs(Shape(2, 6, 2, 3, 150), device)
    check_forward(inputs, softcap, mask, options={"SPLIT_KV": splits, "BLOCK_N": 16})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (24, 80), (5, 3)])
def test_dtypes_and_head_dims(dtype, head_dim, v_head_dim, device):
    if dtype == torch.float64 and device.type != "cpu":
        pytest.skip("float64 runs in the interpreter alone")
    shape = Shape(1, 4, 2, 2, 50)
    inputs = random_inputs(shape, device, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    check_forward(inputs, None, sinks_and_window, options=SPLIT)


def test_more_rows_than_a_tile(device):
    inputs = random_inputs(Shape(1, 12, 1, 16, 40), device)
    check_forward(inputs, softcap, some_heads, options=SPLIT)


@pytest.mark.parametrize("options", [SPLIT, {"SPLIT_KV": 1}])
def test_rows_without_a_live_key_are_zero_and_minus_infinity(options, device):
    def nothing_for_some(b, h, q_idx, kv_idx):
        return (kv_idx < 0) | ((q_idx == 1) & (kv_idx == 33))

    inputs = random_inputs(Shape(2, 4, 2, 3, 60), device)
    output, aux = flexgen.compile(None, nothing_for_some, options)(*inputs, return_aux=EVERYTHING)
    dense = dense_attention(*inputs, None, nothing_for_some)
    torch.testing.assert_close(output.double(), dense.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(aux.lse.double(), dense.lse, rtol=0, atol=1e-5)
    assert aux.max_scores[:, :, 0].eq(-float("inf")).all()


def test_mask_that_is_never_true(device):
    def never(b, h, q_idx, kv_idx):
        return kv_idx < 0

    output = flexgen.compile(None, never, SPLIT)(*random_inputs(Shape(1, 2, 1, 1, 40), device))
    assert output.eq(0).all()


def test_bounds_that_are_read_for_each_row(device):
    starts = torch.tensor([3, 17, 30, 44], device=device)

    def from_its_start(b, h, q_idx, kv_idx):
        return (kv_idx >= starts[q_idx]) & (kv_idx < starts[q_idx] + 20)

    inputs = random_inputs(Shape(2, 6, 2, 4, 70), device)
    check_forward(inputs, None, from_its_start, options=SPLIT)


def test_scores_of_any_magnitude(device):
    bias = torch.zeros(60, device=device)
    bias[::2] = torch.finfo(torch.float32).min

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    inputs = random_inputs(Shape(1, 4, 2, 1, 60), device, dtype=torch.bfloat16)
    check_forward(inputs, biased, None, options=SPLIT)


def test_learnable_sinks(device):
    inputs = random_inputs(Shape(2, 4, 2, 1, 60), device)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    output = flexgen.compile(None, window, SPLIT)(*inputs, sinks=sinks)
    dense = dense_attention(*inputs, None, window)
    kept = torch.sigmoid(dense.lse - sinks.double()[None, :, None])
    torch.testing.assert_close(output.double(), dense.out * kept[..., None], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_take_the_logsumexp_of_the_decode_kernel(dtype, device):
    """The backward kernels need output and logsumexp alone, whichever kernel computed them."""
    inputs = random_inputs(Shape(2, 4, 2, 3, 50), device, dtype=dtype)
    tensors = [tensor.requires_grad_() for tensor in inputs]
    attention = flexgen.compile(softcap, sinks_and_window, SPLIT)
    assert serves(attention, inputs) == "TRITON_DECODE"
    found = torch.autograd.grad(attention(*tensors).float().square().sum(), tensors)
    dense = dense_attention(*tensors, softcap, sinks_and_window).out
    exact = torch.autograd.grad(dense.square().sum(), tensors)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    for grad, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(
            grad.double(), expected.double(), rtol=0, atol=tolerance * float(expected.abs().max())
        )


class TestInputsThatBrokeOthers:
    def test_f14_fewer_keys_than_a_mask_block(self, device):
        check_forward(random_inputs(Shape(1, 1, 1, 1, 64), device, dtype=torch.bfloat16))

    @pytest.mark.parametrize("options", [{"BLOCK_N": 64}, {"BLOCK_N": 64, "SPLIT_KV": 2}])
    def test_f15_keys_past_the_end_do_not_leak_into_the_sum(self, options, device):
        inputs = random_inputs(Shape(1, 2, 2, 1, 70), device)
        direction = torch.ones(16, device=device)
        inputs.query.copy_(-5 * direction)
        inputs.key.copy_(4 * direction + 0.1 * inputs.key)
        check_forward(inputs, options=options)

    def test_f23_many_keys_of_which_few_are_live(self, device):
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        inputs = random_inputs(Shape(1, 1, 1, 16, 65536), device)
        output = flexgen.compile(None, causal)(*inputs)
        first = (inputs.query, inputs.key[:, :, :16], inputs.value[:, :, :16])
        torch.testing.assert_close(output.double(), dense_attention(*first, None, causal).out, rtol=0, atol=1e-5)

    def test_f26_mask_of_some_heads_at_few_queries(self, device):
        head_live = torch.ones(32, dtype=torch.bool, device=device)
        head_live[0] = False

        def live_heads(b, h, q_idx, kv_idx):
            return head_live[h] & (q_idx >= kv_idx)

        inputs = random_inputs(Shape(1, 32, 8, 8, 8), device, dtype=torch.bfloat16, head_dim=32)
        assert check_forward(inputs, None, live_heads)[:, 0].eq(0).all()

    @pytest.mark.parametrize("group", [3, 5, 6, 7])
    def test_f32_groups_that_are_no_powers_of_two(self, group, device):
        check_forward(random_inputs(Shape(1, 2 * group, 2, 1, 64), device), options=SPLIT)


@pytest.mark.parametrize("layout", ["bshd", "strided"])
def test_layouts_and_strides(layout, device):
    inputs = random_inputs(Shape(2, 4, 2, 2, 40), device)
    expected = dense_attention(*inputs, None, window).out
    if layout == "bshd":
        swapped = [tensor.transpose(1, 2).contiguous() for tensor in inputs]
        output = flexgen.compile(None, window, {**SPLIT, "layout": "bshd"})(*swapped).transpose(1, 2)
    else:
        query, key, value = inputs
        value = value.transpose(2, 3).contiguous().transpose(2, 3)
        output = flexgen.compile(None, window, SPLIT)(query, key[:1].expand(2, -1, -1, -1), value)
        expected = dense_attention(query, key[:1].expand(2, -1, -1, -1), value, None, window).out
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_no_queries_no_keys(device):
    query, key, value = random_inputs(Shape(2, 4, 2, 1, 40), device)
    assert flexgen.compile(None, None, SPLIT)(query, key[:, :, :0], value[:, :, :0]).eq(0).all()
    assert flexgen.compile()(query[:, :, :0], key, value).shape == (2, 4, 0, 16)
    assert flexgen.compile(None, None, SPLIT)(query[:0], key[:0], value[:0]).shape == (0, 4, 1, 16)
