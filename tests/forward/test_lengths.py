"""Lengths of every kind: none, one, shorter than a block, primes, few queries against many keys."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, check_block_mask, check_forward, random_inputs, refusal


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_block_mask", [False, True])
def test_keys_shorter_than_one_mask_block(device, dtype, with_block_mask):
    inputs = random_inputs(Shape(1, 1, 1, 1, 64), device, dtype=dtype)
    if not with_block_mask:
        check_forward(inputs)
        return
    block_mask = flexgen.create_block_mask(flexgen.noop_mask, 1, 1, 1, 64, device=device, BLOCK_SIZE=128)
    check_block_mask(inputs, block_mask)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "block_size"), [(24, 40, 16), (100, 300, (64, 96)), (40, 24, (16, 32)), (17, 129, 128)]
)
def test_block_masks_of_unequal_lengths(device, q_len, kv_len, block_size):
    inputs = random_inputs(Shape(1, 2, 1, q_len, kv_len), device)
    offset = kv_len - q_len

    def mask(b, h, q, k):
        return q + offset >= k

    block_mask = flexgen.create_block_mask(mask, 1, 1, q_len, kv_len, device=device, BLOCK_SIZE=block_size)
    check_block_mask(inputs, block_mask)
    check_forward(inputs, mask_mod=mask)


def test_no_queries_give_an_empty_output(device):
    inputs = random_inputs(Shape(2, 2, 2, 0, 8), device)
    out, aux = flexgen.compile(mask_mod=causal)(*inputs, return_aux=EVERYTHING)
    assert out.shape == (2, 2, 0, 16)
    assert aux.lse.shape == aux.max_scores.shape == (2, 2, 0)


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_no_keys_give_zeros_and_minus_infinity(device, mask_mod):
    inputs = random_inputs(Shape(2, 4, 2, 8, 0), device, v_head_dim=5)
    out = check_forward(inputs, lambda score, b, h, q, k: score * 2, mask_mod)
    assert torch.equal(out, torch.zeros(2, 4, 8, 5, device=device))


def test_no_batch_gives_an_empty_output(device):
    inputs = random_inputs(Shape(0, 2, 2, 8, 8), device)
    out, aux = flexgen.compile()(*inputs, return_aux=EVERYTHING)
    assert out.shape == (0, 2, 8, 16)
    assert aux.lse.shape == (0, 2, 8)


def test_drop_in_accepts_empty_lengths(device):
    inputs = random_inputs(Shape(1, 1, 1, 0, 8), device)
    assert flexgen.flex_attention(*inputs).shape == (1, 1, 0, 16)
    inputs = random_inputs(Shape(1, 1, 1, 8, 0), device)
    assert torch.count_nonzero(flexgen.flex_attention(*inputs)) == 0


def test_few_causal_queries_see_the_first_of_many_keys(device):
    inputs = random_inputs(Shape(1, 1, 1, 16, 16384), device)
    out = flexgen.compile(mask_mod=causal)(*inputs)
    first = flexgen.compile(mask_mod=causal)(inputs.query, inputs.key[:, :, :16], inputs.value[:, :, :16])
    torch.testing.assert_close(out, first, rtol=1e-5, atol=1e-5)


def test_block_mask_with_one_live_block_of_many(device):
    q_len, kv_len = 16, 65536
    inputs = random_inputs(Shape(1, 1, 1, q_len, kv_len), device)
    block_mask = flexgen.create_block_mask(causal, 1, 1, q_len, kv_len, device=device)
    out = flexgen.flex_attention(*inputs, block_mask=block_mask)
    first = flexgen.compile(mask_mod=causal)(inputs.query, inputs.key[:, :, :16], inputs.value[:, :, :16])
    torch.testing.assert_close(out, first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_len", [1, 2, 15, 16, 17, 31, 33, 61])
@pytest.mark.parametrize("kv_len", [1, 16, 33, 67])
def test_lengths_around_tiles(device, q_len, kv_len):
    inputs = random_inputs(Shape(1, 1, 1, q_len, kv_len), device)
    check_forward(inputs, mask_mod=causal, options={"BLOCK_M": 16, "BLOCK_N": 32})


@pytest.mark.parametrize("length", [127, 128, 129, 131])
def test_lengths_around_the_divisibility_that_plans_distinguish(device, length):
    inputs = random_inputs(Shape(1, 1, 1, length, length), device)
    check_forward(inputs, lambda score, b, h, q, k: score + 0.01 * (q - k), causal)


def test_one_attention_serves_changing_lengths(device):
    """A plan or a launch kept from an earlier length must not leak into a later one."""
    attention = flexgen.compile(mask_mod=causal)
    for q_len, kv_len in [(128, 128), (1, 128), (1, 129), (16, 144), (1, 1), (40, 24), (128, 128)]:
        inputs = random_inputs(Shape(1, 1, 1, q_len, kv_len), device, seed=q_len + kv_len)
        check_forward(inputs, mask_mod=causal, attention=attention)


@pytest.mark.parametrize(
    ("block_mask_shape", "mentions"),
    [
        ((2, 1, 256, 256), ("256", "2")),
        ((1, 1, 2, 256), ("256",)),
        ((1, 1, 256, 2), ("256",)),
        ((1, 1, 1, 1), ("1", "2")),
    ],
)
def test_block_mask_of_other_lengths_is_refused(device, block_mask_shape, mentions):
    inputs = random_inputs(Shape(2, 1, 1, 2, 2), device)
    block_mask = flexgen.create_block_mask(causal, *block_mask_shape, device=device)
    call = lambda: flexgen.flex_attention(*inputs, block_mask=block_mask)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, *mentions)
    call = lambda: flexgen.compile(mask_mod=causal)(*inputs, block_table=block_mask)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, *mentions)
