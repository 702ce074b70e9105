"""Packed sequences are computed as each of them alone: outputs and gradients against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from tests.backward.run import draw, learned
from tests.reference import assert_near
from tests.varlen.run import SMALL_TILES, check_packed, in_a_loop, pack

UNEVEN = (5, 0, 37, 1, 16, 31, 33)  # empty, single, a whole tile, and about one


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 12)


def around(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 9) & (kv_idx - q_idx < 7)


def every_third(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def nothing(b, h, q_idx, kv_idx):
    return q_idx < 0


@pytest.mark.parametrize("mask", [None, causal, window, around, every_third, nothing])
def test_masks_see_indices_within_the_sequence(mask: Any, device: torch.device) -> None:
    check_packed(pack(UNEVEN, unused=9, heads=(1, 1), device=device), mask=mask)


@pytest.mark.parametrize("mask", [None, causal, window])
def test_queries_and_keys_of_different_lengths(mask: Any, device: torch.device) -> None:
    packed = pack((3, 20, 0, 17, 1, 8), (40, 0, 5, 16, 1, 21), unused=3, device=device)
    check_packed(packed, mask=mask)


def test_a_window_into_the_keys_before_the_queries(device: torch.device) -> None:
    ahead = torch.tensor([0, 30, 7], device=device)

    def chunk(b, h, q_idx, kv_idx):
        return (q_idx + ahead[b] >= kv_idx) & (q_idx + ahead[b] - kv_idx < 10)

    check_packed(pack((20, 4, 9), (20, 34, 16), device=device), mask=chunk)


def test_a_prefix_for_each_sequence(device: torch.device) -> None:
    prefix = torch.tensor([4, 0, 30, 1, 2, 17, 8], device=device)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < prefix[b])

    check_packed(pack(UNEVEN, device=device), mask=prefix_lm)


def test_captured_values_of_any_name_are_themselves(device: torch.device) -> None:
    cu_seqlens_q = torch.tensor([1, 2, 30], device=device)
    SEQUENCES = torch.tensor([5, 3, 0], device=device)
    q_begin = torch.tensor(2, device=device)

    def named_like_the_kernel(b, h, q_idx, kv_idx):
        return (q_idx + SEQUENCES[b] >= kv_idx) & (q_idx - kv_idx < cu_seqlens_q[b] + q_begin)

    check_packed(pack((20, 4, 33), heads=(1, 1), device=device), mask=named_like_the_kernel)


def test_a_learned_slope_for_each_head(device: torch.device) -> None:
    def make(slope):
        return lambda score, b, h, q_idx, kv_idx: score - slope[h] * (q_idx - kv_idx)

    check_packed(pack(UNEVEN, unused=5, device=device), learned(make, draw(2, device=device)), causal)


def test_a_learned_table_for_each_sequence(device: torch.device) -> None:
    def make(table, bias):
        return lambda score, b, h, q_idx, kv_idx: score * table[b] + bias[b, kv_idx] + bias[b, q_idx]

    tensors = draw(len(UNEVEN), device=device), draw(len(UNEVEN), 37, seed=1, device=device)
    check_packed(pack(UNEVEN, unused=20, device=device), learned(make, *tensors), causal)


def test_a_learned_bias_of_relative_positions(device: torch.device) -> None:
    def make(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + 40]

    check_packed(pack(UNEVEN, device=device), learned(make, draw(2, 81, device=device)))


def test_deterministic_gradients_of_captured_tensors_repeat(device: torch.device) -> None:
    table = draw(len(UNEVEN), device=device)

    def make(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[b] * (q_idx - kv_idx) * 0.1

    torch.use_deterministic_algorithms(True)
    try:
        check_packed(pack(UNEVEN, unused=4, device=device), learned(make, table), window)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads_in_both_layouts(layout: str, device: torch.device) -> None:
    packed = pack((7, 0, 18, 1), heads=(6, 2), unused=2, v_head_dim=24, device=device)
    check_packed(packed, mask=causal, layout=layout)


def test_few_queries_of_grouped_heads_are_not_packed_into_one_tile(device: torch.device) -> None:
    check_packed(pack((2, 1, 0, 3), (19, 4, 8, 33), heads=(4, 1), device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    check_packed(pack((18, 1, 0, 25), dtype=dtype, unused=6, device=device), mask=causal)


def test_float64() -> None:
    check_packed(pack((18, 1, 0, 25), dtype=torch.float64, unused=6), mask=causal)


def test_offsets_of_64_bits(device: torch.device) -> None:
    check_packed(pack(UNEVEN, index_dtype=torch.int64, unused=7, device=device), mask=causal)


def test_padded_head_dims(device: torch.device) -> None:
    check_packed(pack((17, 3), head_dim=20, v_head_dim=8, device=device), mask=causal)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_numbers_of_sequences(count: int, device: torch.device) -> None:
    lengths = [(7 * i * i + 3 * i) % 11 for i in range(count)]
    check_packed(pack(lengths, heads=(1, 1), unused=1, device=device), mask=causal)


def test_more_sequences_than_are_compared_at_a_time(device: torch.device) -> None:
    lengths = [int(i % 9 == 0) for i in range(300)]
    check_packed(pack(lengths, heads=(1, 1), unused=1, device=device, grad=False), mask=causal)


@pytest.mark.parametrize("count", [128, 129, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 16384, 16385))])
def test_the_search_at_its_seams(count: int, device: torch.device) -> None:
    """Only few sequences have tokens, among them the first, the last, and those about whole steps of the search."""
    busy = {0, 1, 126, 127, 128, 129, 16255, 16383, 16384, count - 1}
    lengths = [3 if i in busy else 0 for i in range(count)]
    packed = pack(lengths, heads=(1, 1), unused=2, device=device, grad=False)
    out = flexgen.compile(None, causal, SMALL_TILES)(*packed.tensors, **packed.offsets)
    short = pack([3] * sum(length > 0 for length in lengths), heads=(1, 1), unused=2, device=device, grad=False)
    exact = in_a_loop(short, None, causal)
    assert_near("out", out, exact.out, 1e-5)


def test_no_sequence_at_all(device: torch.device) -> None:
    check_packed(pack((), unused=20, device=device))


def test_no_tokens(device: torch.device) -> None:
    check_packed(pack((0, 0), device=device, grad=False))


def test_the_default_tiles(device: torch.device) -> None:
    check_packed(pack((150, 3, 129, 64), heads=(1, 1), device=device), mask=causal, options=dict.fromkeys(SMALL_TILES))


def test_a_scale_and_options_of_the_plain_kernel(device: torch.device) -> None:
    options = {"fwd_USE_SUBTILING": True, "fwd_PRESCALE_QK": True}
    check_packed(pack((20, 9), device=device), mask=window, scale=0.3, options=options)


def test_tensors_that_are_not_contiguous(device: torch.device) -> None:
    packed = pack((20, 9), device=device, head_dim=32, grad=False)
    strided = type(packed)(*(tensor[..., ::2] for tensor in packed.tensors), packed.cu_seqlens_q)
    check_packed(strided, mask=causal)
