"""Options of the backward kernels."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, draw, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import refusal, square

SHAPE = Shape(1, 4, 2, 70, 50)


def causal(b, h, q, k):
    return q + 20 >= k


def relative(table):
    return lambda score, b, h, q, k: score * 1.5 + table[q - k + 49]


@pytest.mark.parametrize(
    "options",
    [
        {"BLOCK_M1": 16, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 16},
        {"BLOCK_M1": 64, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 128},
        {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 32, "fwd_BLOCK_M": 16},
        {"bwd_num_warps": 8, "bwd_num_stages": 2},
        {"num_warps": 2, "num_stages": 1, "BLOCK_M": 32},
        {"WRITE_DQ": False},
        {"WRITE_DQ": True, "FLOAT32_PRECISION": "ieee"},
        {"PRESCALE_QK": True, "USE_SUBTILING": True},
        {"bwd_PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True},
    ],
    ids=str,
)
def test_options_change_no_gradient(device, options):
    table = draw(119, device=device)
    check_backward(training_inputs(SHAPE, device), learned(relative, table), causal, options=options)


@pytest.mark.parametrize("name", ["fwd_BLOCK_M1", "fwd_WRITE_DQ", "bwd_BLOCK_M", "bwd_USE_TMA", "bwd_PRESCALE_QK"])
def test_choices_for_kernels_that_do_not_have_them_are_refused(name):
    value = 32 if "BLOCK" in name else True
    refusal(lambda: flexgen.compile(options={name: value}), flexgen.OptionError, name, "drop it")


def test_narrow_precision_is_close(device):
    inputs = training_inputs(square(40), device)
    exact = torch.autograd.grad(flexgen.compile()(*inputs).sum(), list(inputs))
    fast = torch.autograd.grad(flexgen.compile(options={"FLOAT32_PRECISION": "tf32"})(*inputs).sum(), list(inputs))
    for one, other in zip(fast, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_tile_that_does_not_divide_the_mask_block_is_refused(device):
    inputs = training_inputs(square(192), device)
    table = flexgen.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 192, 192, device=device, BLOCK_SIZE=96)
    out = flexgen.flex_attention(*inputs, block_mask=table, kernel_options={"BLOCK_N1": 64})
    refusal(lambda: out.sum().backward(), flexgen.OptionError, "BLOCK_N1", "64", "96")
