"""Rows and tiles without a live key: output 0 and statistics -inf, never NaN, whatever option claims otherwise."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import check_block_mask, check_forward, random_inputs, square

MINUS_INFINITY = float("-inf")


def test_fully_masked_rows_are_zero_with_lse_minus_infinity(device):
    inputs = random_inputs(square(8), device)

    def late_causal(b, h, q, k):
        return (q >= 4) & (k <= q)

    out, aux = flexgen.compile(mask_mod=late_causal)(*inputs, return_aux=flexgen.AuxRequest(lse=True, max_scores=True))
    assert torch.equal(out[:, :, :4], torch.zeros_like(out[:, :, :4]))
    assert (aux.lse[:, :, :4] == MINUS_INFINITY).all()
    assert (aux.max_scores[:, :, :4] == MINUS_INFINITY).all()
    check_forward(inputs, mask_mod=late_causal)


@pytest.mark.parametrize("length", [1, 37, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_live(device, length, dtype):
    inputs = random_inputs(square(length), device, dtype=dtype)
    out = check_forward(inputs, mask_mod=lambda b, h, q, k: k < 0)
    assert torch.count_nonzero(out) == 0


def test_rows_without_keys_between_rows_with_keys(device):
    inputs = random_inputs(square(70, heads=2), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: (q % 3 != 1) & (k <= q))


def test_whole_batches_and_heads_without_keys(device):
    inputs = random_inputs(square(33, batch=2, heads=2), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: ((b + h) % 2 == 0) & (k <= q))


def grouped_past(length, group):
    """Return a mask of two halves: a causal band, then groups that see a growing part of the first half."""

    def mask(b, h, q, k):
        band = (q < length) & (k <= q) & (q - k < group)
        number = (q - length) // group
        leader = (q - length) % group == 0
        past = (q >= length) & ~leader & (k < group * number) & (k < length)
        return band | past

    return mask


def test_structured_mask_of_two_segments_with_empty_rows(device):
    inputs = random_inputs(square(128), device)
    out = check_forward(inputs, mask_mod=grouped_past(64, 4))
    leaders = torch.arange(64, 128, 4, device=device)
    assert torch.count_nonzero(out[:, :, leaders]) == 0


WINDOW_TILES = {"BLOCK_M": 128, "BLOCK_N": 32}


def window_of_eight(b, h, q, k):
    return (q - k >= 0) & (q - k < 8)


@pytest.mark.parametrize("flag", [False, True])
def test_rows_guaranteed_safe_never_makes_nan_where_a_first_tile_is_dead_for_some_rows(device, flag):
    inputs = random_inputs(square(256), device)
    options = {**WINDOW_TILES, "ROWS_GUARANTEED_SAFE": flag}
    check_forward(inputs, mask_mod=window_of_eight, options=options)
    block_mask = flexgen.create_block_mask(window_of_eight, 1, 1, 256, 256, device=device, BLOCK_SIZE=128)
    check_block_mask(inputs, block_mask, kernel_options=options)


def test_rows_guaranteed_safe_is_harmless_when_it_is_false(device):
    inputs = random_inputs(square(48), device)
    check_forward(inputs, mask_mod=lambda b, h, q, k: (q > 20) & (k <= q), options={"ROWS_GUARANTEED_SAFE": True})


def test_blocks_are_contiguous_is_caught_or_harmless_when_it_is_false(device):
    inputs = random_inputs(square(96), device)

    def ends_only(b, h, q, k):
        return (k < 16) | (k >= 80)

    block_mask = flexgen.create_block_mask(ends_only, 1, 1, 96, 96, device=device, BLOCK_SIZE=16)
    options = {"BLOCKS_ARE_CONTIGUOUS": True, "BLOCK_M": 16, "BLOCK_N": 16}
    check_forward(inputs, mask_mod=ends_only, options=options)
    try:
        check_block_mask(inputs, block_mask, kernel_options=options)
    except flexgen.OptionError as error:
        caught = str(error)
    else:
        return
    assert "BLOCKS_ARE_CONTIGUOUS" in caught


@pytest.mark.parametrize("fill", [MINUS_INFINITY, -torch.inf, torch.finfo(torch.float32).min])
def test_score_mod_that_hides_rows(device, fill):
    inputs = random_inputs(square(8), device)
    check_forward(inputs, lambda score, b, h, q, k: torch.where(q >= 4, score, fill))


@pytest.mark.parametrize("first_live_key", [200, 255, 256])
def test_score_mod_that_hides_the_first_tiles(device, first_live_key):
    inputs = random_inputs(square(256), device)

    def mod(score, b, h, q, k):
        return torch.where(k >= first_live_key, score, MINUS_INFINITY)

    check_forward(inputs, mod, options={"BLOCK_M": 64, "BLOCK_N": 32})


def test_score_mod_and_mask_mod_hide_together(device):
    inputs = random_inputs(square(50), device)

    def mod(score, b, h, q, k):
        return torch.where((q + k) % 2 == 0, score, MINUS_INFINITY)

    check_forward(inputs, mod, lambda b, h, q, k: (k <= q) & (k % 2 == 1))


def test_nan_of_the_score_mod_in_masked_places_is_dropped(device):
    inputs = random_inputs(square(40), device)
    check_forward(inputs, lambda score, b, h, q, k: score + torch.sqrt((q - k).float()), lambda b, h, q, k: q >= k)


def test_captured_table_is_not_read_where_the_mask_forbids(device):
    inputs = random_inputs(square(128), device)
    table = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(device)
    short = table[:127].clone()

    def mask(b, h, q, k):
        return (k < 127) & (q >= k)

    expected = check_forward(inputs, lambda score, b, h, q, k: score + table[k], mask)
    out = flexgen.compile(lambda score, b, h, q, k: score + short[k], mask)(*inputs)
    assert torch.equal(out, expected)


def test_captured_table_is_not_read_past_the_keys_that_exist(device):
    """The last tile covers keys that do not exist; a table of exactly the right length must not be overrun."""
    inputs = random_inputs(Shape(1, 1, 1, 19, 70), device)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(4)).to(device)
    rows = torch.randn(19, 70, generator=torch.Generator().manual_seed(5)).to(device)
    check_forward(inputs, lambda score, b, h, q, k: score + bias[k] + rows[q, k])


def test_missing_keys_of_a_full_last_block_do_not_leak_into_the_sum(device):
    """All real scores are about -20, so that one leaked exp(0) would swamp them."""
    length = 70
    inputs = random_inputs(square(length), device)
    inputs.query[:] = -1.0
    inputs.key[:] = 20.0 / 16**0.5 + 0.01 * inputs.key
    check_forward(inputs)
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64}
    check_forward(inputs, options=tiles)
    all_true = torch.ones(1, 1, 2, dtype=torch.int32, device=device)
    every = torch.arange(2, dtype=torch.int32, device=device).expand(1, 1, 2, 2).contiguous()
    full = torch.nn.attention.flex_attention.BlockMask.from_kv_blocks(
        torch.zeros_like(all_true), every, all_true * 2, every, BLOCK_SIZE=64, seq_lengths=(length, length)
    )
    check_block_mask(inputs, full, kernel_options=tiles)


@pytest.mark.gpu
def test_missing_keys_do_not_leak_through_the_bulk_copy_engine():
    device = torch.device("cuda")
    inputs = random_inputs(square(70), device, dtype=torch.bfloat16, head_dim=64)
    inputs.query[:] = -1.0
    inputs.key[:] = 20.0 / 64**0.5
    check_forward(inputs, options={"USE_TMA": True})
