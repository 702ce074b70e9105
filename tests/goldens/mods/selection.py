"""Comparisons, bits, selection and conversion."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import case


@case()
def comparisons_need_brackets_inside_bit_operators():
    def mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx != 7) | (kv_idx < 4) & (q_idx > 2) | (q_idx == kv_idx)

    return mod


@case()
def negation_of_a_comparison_is_its_opposite():
    def mod(b, h, q_idx, kv_idx):
        return ~(kv_idx > q_idx)

    return mod


@case()
def negation_and_exclusive_or():
    def mod(b, h, q_idx, kv_idx):
        return (q_idx <= kv_idx) ^ ~((kv_idx < 4) & (q_idx % 2 == 0))

    return mod


@case()
def logical_functions_are_bit_operators():
    def mod(b, h, q_idx, kv_idx):
        return torch.logical_and(q_idx >= kv_idx, torch.logical_not(torch.logical_or(h == 3, kv_idx == 9)))

    return mod


@case()
def shifts_and_bits_of_integers():
    def mod(score, b, h, q_idx, kv_idx):
        return score + ((q_idx >> 2 ^ kv_idx << 1) & 7) + (~h | 8)

    return mod


@case()
def where_with_a_constant_branch():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return mod


@case()
def masked_fill_is_a_where():
    def mod(score, b, h, q_idx, kv_idx):
        return score.masked_fill(kv_idx > q_idx, -1.0e4)

    return mod


@case()
def truth_of_a_number_is_a_comparison_with_zero():
    def mod(b, h, q_idx, kv_idx):
        return (kv_idx & 1).bool()

    return mod


@case()
def a_bool_adds_as_zero_or_one():
    def mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx >= kv_idx)

    return mod


@case()
def rounding_to_half_precision_is_kept():
    def mod(score, b, h, q_idx, kv_idx):
        return score.to(torch.bfloat16) + score.half().float()

    return mod


@case()
def conversion_to_an_integer_truncates():
    def mod(score, b, h, q_idx, kv_idx):
        return (score * 8.0).to(torch.int32) * 0.125

    return mod


@case()
def a_result_of_no_axis_is_broadcast_to_the_tile():
    def mod(score, b, h, q_idx, kv_idx):
        return 0.5

    return mod


@case()
def a_result_of_one_axis_is_broadcast_to_the_tile():
    def mod(score, b, h, q_idx, kv_idx):
        return kv_idx * 0.5

    return mod
