"""The user's names and lines in the emitted function, also the hostile ones."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import LENGTH, case


@case()
def variables_keep_their_names():
    def mod(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        is_near = distance.abs() < 8
        is_causal = distance >= 0
        return is_near & is_causal

    return mod


@case()
def parameters_may_have_any_name():
    def mod(s, batch, head, q, k):
        shift = q - k
        return s + shift

    return mod


@case()
def lines_of_nested_functions_are_shown():
    def near(q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 8

    def mod(b, h, q_idx, kv_idx):
        return near(q_idx, kv_idx) & (q_idx >= kv_idx)

    return mod


@case()
def reassigned_variable_is_numbered():
    def mod(score, b, h, q_idx, kv_idx):
        score = score.tanh()
        score = score * score + h
        return score * score

    return mod


@case()
def names_of_the_kernel_are_avoided():
    tl = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        floor_div = (q_idx - kv_idx) // 3
        triton = floor_div * floor_div
        return score + triton * tl[kv_idx]

    return mod


@case()
def names_python_cannot_print_are_made_printable():
    größe = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        lambda_λ = größe[kv_idx]  # "quotes" and \N{ESCAPES}
        return score + lambda_λ * lambda_λ

    return mod


@case()
def captured_names_equal_to_template_variables():
    BLOCK_M = torch.zeros(LENGTH)
    key_ptr = torch.zeros(4)

    def mod(score, b, h, q_idx, kv_idx):
        return score + BLOCK_M[kv_idx] * key_ptr[h]

    return mod


@case()
def long_expression_is_cut_into_named_steps():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.exp(-(q_idx - kv_idx).abs() / 100.0) * torch.cos((q_idx - kv_idx) * 0.01) * (h + 1)

    return mod


@case()
def one_line_of_the_user_is_shown_once():
    def mod(b, h, q_idx, kv_idx):
        left, right = q_idx // 4 + q_idx // 8, kv_idx // 4 + kv_idx // 8
        return (left >= right) & (left != right + 3)

    return mod
