"""Integer arithmetic on indices: which division is printed, and in how many bits."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import case


@case()
def division_of_an_index_needs_no_helper():
    def mod(b, h, q_idx, kv_idx):
        return q_idx // 16 == kv_idx // 16

    return mod


@case()
def division_of_a_difference_floors_by_a_helper():
    def mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx) // 3

    return mod


@case()
def remainder_of_a_difference_floors_by_a_helper():
    def mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 3 == 0

    return mod


@case()
def division_by_a_negative_number_floors_by_a_helper():
    def mod(score, b, h, q_idx, kv_idx):
        return score + kv_idx // -4

    return mod


@case()
def division_of_a_magnitude_needs_no_helper():
    def mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx).abs() // 3

    return mod


@case()
def division_after_a_clamp_needs_no_helper():
    def mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx).clamp(min=0) // 3

    return mod


@case()
def differences_of_indices_are_in_32_bits():
    def mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) * 2 + 1 < 1000

    return mod


@case()
def a_product_of_indices_keeps_64_bits():
    def mod(b, h, q_idx, kv_idx):
        return q_idx * kv_idx < 1000

    return mod


@case()
def a_constant_past_32_bits_keeps_64_bits():
    def mod(b, h, q_idx, kv_idx):
        return (q_idx + 3_000_000_000) % 7 == kv_idx % 7

    return mod


@case()
def int32_arithmetic_the_user_asked_for_stays():
    def mod(b, h, q_idx, kv_idx):
        return q_idx.to(torch.int32) * kv_idx.to(torch.int32) < 1000

    return mod
