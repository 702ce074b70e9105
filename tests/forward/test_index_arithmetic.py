"""Index arithmetic means what int64 means: kernels may narrow it only where no value can leave 32 bits."""

from __future__ import annotations

import pytest
import torch

from tests.corpus.case import Shape, random_ints
from tests.forward.run import check_forward, random_inputs

CASES = {
    "hash_with_a_multiplier_past_32_bits": lambda b, h, q, k: (q * 2654435761 + k * 40503 + h) % 2**32 > 2**31,
    "constant_offsets_past_32_bits": lambda b, h, q, k: k + 2**31 > q + 2**31 - 5,
    "comparison_with_a_constant_past_32_bits": lambda b, h, q, k: (q - k < 2**40) & (k > -(2**33)),
    "shift_past_bit_31": lambda b, h, q, k: ((1 << k) & 0x5555_3333_0F0F_00FF) != 0,
    "product_of_products": lambda b, h, q, k: (q * k * 100_000_007) % 1000 < 500,
    "square_of_a_scaled_index": lambda b, h, q, k: (q * 100_000) * (k * 100_000) > 10**12,
    "difference_of_large_terms": lambda b, h, q, k: q * 2**30 - k * 2**30 >= 0,
    "sum_whose_parts_fit": lambda b, h, q, k: (q + 2**30) + (k + 2**30) > 2**31 + 40,
    "negation_of_the_lowest_int": lambda b, h, q, k: -(k - 2**31) > q,
    "power": lambda b, h, q, k: (k + 1) ** 6 > (q + 1) ** 6,
    "floor_division_by_a_large_constant": lambda b, h, q, k: (k - q) // 2**35 == 0,
}


@pytest.mark.parametrize("mask", CASES.values(), ids=CASES.keys())
def test_masks_on_small_indices(device, mask):
    check_forward(random_inputs(Shape(1, 2, 2, 35, 60), device), mask_mod=mask)


def test_shift_of_a_64_bit_table(device):
    bits = random_ints(0, 2**62, 35, seed=1, device=device)
    check_forward(random_inputs(Shape(1, 1, 1, 35, 61), device), mask_mod=lambda b, h, q, k: ((bits[q] >> k) & 1) == 1)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40, -(2**31), -(2**40)])
def test_captured_numbers_past_32_bits(device, window):
    inputs = random_inputs(Shape(1, 1, 1, 35, 60), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: q - k < window)
    check_forward(inputs, mask_mod=lambda b, h, q, k: q + window > k + window - 3)


def test_products_of_long_queries(device):
    """Small constants times long lengths: no constant gives the overflow away."""
    inputs = random_inputs(Shape(1, 1, 1, 3000, 16), device)
    options = {"BLOCK_M": 128}
    check_forward(inputs, mask_mod=lambda b, h, q, k: (q * 1_000_003 + k * 7919) % 65536 < 30000, options=options)


def test_squares_of_long_keys(device):
    inputs = random_inputs(Shape(1, 1, 1, 16, 50_000), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: k * k > 2_000_000_000, options={"BLOCK_N": 512})


def test_products_in_score_mods(device):
    inputs = random_inputs(Shape(1, 1, 1, 20, 24), device)
    check_forward(inputs, lambda score, b, h, q, k: score + (q * k * 100_000_000) * 1e-11)


def test_narrow_tables_wrap_as_torch_wraps(device):
    """A sum of int8 or int32 values wraps in its own dtype, and is not silently computed wider."""
    small = (torch.arange(40, device=device) * 5 - 100).to(torch.int8)
    wide = (torch.arange(40, device=device) * 2**27).to(torch.int32)
    inputs = random_inputs(Shape(1, 1, 1, 40, 40), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: small[q] + small[k] > 0)
    check_forward(inputs, mask_mod=lambda b, h, q, k: wide[q] + wide[k] > 0)
