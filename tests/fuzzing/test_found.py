"""What fuzzing found, each as small as it was made, by the kind of mistake that was behind it."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.fuzzing.check import check_call
from flexgen.fuzzing.inputs import drawn


def inputs(length: int = 7, dtype: str = "float32", requires_grad: bool = False):
    return (drawn((1, 1, length, 16), dtype, seed, requires_grad=requires_grad) for seed in range(3))


def values_of(mod, length: int) -> torch.Tensor:
    """Return what a score_mod gives for each key, exactly as the kernel computes it."""
    query, key, value = inputs(length)
    attention = flexgen.compile(mod, lambda b, h, q, k: q == k)
    return attention(query, key, value, return_aux=flexgen.AuxRequest(max_scores=True))[1].max_scores[0, 0]


def test_a_bound_that_is_itself_a_minimum_of_maxima_ends_with_the_keys():
    """Printed, it looked like a bound that had been clamped to the keys already, and tiles past them were visited."""

    def mask_mod(b, h, q, k):
        return ((k < 64) | (q + 15 >= k)) & ((q + 15 - k).abs() <= 16)

    query, key, value = (drawn((1, 1, length, 16), seed=length) for length in (32, 7, 7))
    check_call(flexgen.compile(mask_mod=mask_mod), query, key, value)


@pytest.mark.parametrize("layout", ["repeated along 0", "repeated along 1", "contiguous"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_outside_of_a_dimension_of_stride_0_there_is_0(layout: str, dtype: str):
    table = drawn((5, 6), dtype, 95, layout, low=1, high=9)

    def score_mod(score, b, h, q, k):
        return score + table[k, q - 2]

    check_call(flexgen.compile(score_mod), *inputs(9))


def test_float_division_that_floors_has_a_gradient_in_float64():
    def score_mod(score, b, h, q, k):
        return torch.remainder(score, score.abs() + 0.5) + score // 0.3

    check_call(flexgen.compile(score_mod), *inputs(7, "float64", requires_grad=True), backward=True)


def test_a_choice_of_two_numbers_keeps_the_digits_of_float64():
    def score_mod(score, b, h, q, k):
        return score + 0.2 * score.masked_fill(h >= k, -1e4)

    check_call(flexgen.compile(score_mod), *inputs(7, "float64", requires_grad=True), backward=True)


def test_float_division_floors_the_exact_quotient():
    """0.1 is a little more than a tenth, so that 1 // 0.1 is 9, while 1 / 0.1 rounds to 10."""
    table = torch.tensor([1.0, 0.5, 0.9, -1.0, -0.3, 7.0, 1e30, 0.0])
    for divisor in (0.1, -0.1, 0.3, 0.7, 1e-3):
        assert torch.equal(values_of(lambda s, b, h, q, k, d=divisor: table[k] // d, 8), table // divisor), divisor


def test_rounding_is_right_next_to_a_half_and_where_there_are_no_halves():
    table = torch.tensor([0.5, 0.49999997, 8388609.0, -8388609.0, 4194305.5, 2.5, -1.5, -0.49999997])
    assert torch.equal(values_of(lambda s, b, h, q, k: torch.round(table[k]), 8), torch.round(table))


@pytest.mark.parametrize(("dtype", "number"), [("uint8", -1), ("uint8", 300), ("int8", -300), ("int32", 2**40 + 3)])
def test_a_number_wraps_into_a_narrow_integer_as_torch_wraps_it(dtype: str, number: int):
    """As a constant it was refused, and as an argument of the kernel it wrapped."""
    table = torch.tensor([0, 5, 127, 100, 44, 3], dtype=getattr(torch, dtype))

    def score_mod(score, b, h, q, k):
        return (table[k] < number) * 4.0 + (table[k] == number) + (table[k] + number)

    plain = (table < number) * 4.0 + (table == number) + (table + number)
    assert torch.equal(values_of(score_mod, 6), plain.float())


def test_a_number_outside_of_a_narrow_integer_is_no_bound_of_a_clamp():
    table = torch.arange(7, dtype=torch.uint8)
    with pytest.raises(flexgen.CaptureError, match="without overflow"):  # torch's own words
        values_of(lambda s, b, h, q, k: table[k].clamp(max=300), 7)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "float16", "float32"])
def test_a_condition_that_another_decides_is_a_number_too(dtype: str):
    """Where both had to hold, the bound of a row was computed from `True.to(tl.int32)`, which is no Triton."""

    def mask_mod(b, h, q, k):
        together = q // 2 == k // 2
        return together & (q >= k) & (q < together.to(getattr(torch, dtype)) * 3)

    check_call(flexgen.compile(mask_mod=mask_mod), *inputs(requires_grad=True), backward=True)


@pytest.mark.parametrize("of", ["query", "key"])
def test_slopes_past_the_end_of_a_full_block_are_not_added(of: str):
    """A block that a table lists as full may end behind the data: scores there are 0, and 1 / 0 times 0 is NaN."""
    table = torch.arange(160) // 999

    def mask_mod(b, h, q, k):
        return table[q] == table[k]

    def score_mod(score, b, h, q, k):
        return score + torch.sqrt(score.abs())

    lengths = (128, 17) if of == "query" else (17, 128)
    query, key, value = (drawn((1, 2, length, 8), seed=length, requires_grad=True) for length in (*lengths, lengths[1]))
    attention = flexgen.compile(score_mod, mask_mod, {"BLOCK_M": 16, "BLOCK_N": 16})
    check_call(attention, query, key, value, backward=True)
    blocks = flexgen.create_block_mask(mask_mod, None, None, *lengths, device="cpu", BLOCK_SIZE=16)
    check_call(attention, query, key, value, backward=True, block_table=blocks)
