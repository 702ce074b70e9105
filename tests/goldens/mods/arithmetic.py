"""Arithmetic of scores and indices."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import case


@case()
def operators_keep_their_precedence():
    def mod(score, b, h, q_idx, kv_idx):
        return (score + 1.0) * 2.0 - score / (3.0 - score)

    return mod


@case()
def subtraction_and_negation_keep_their_brackets():
    def mod(score, b, h, q_idx, kv_idx):
        return -(score - (q_idx - (kv_idx - h)))

    return mod


@case()
def minimum_and_maximum_propagate_nan():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.minimum(torch.maximum(score, -score), score * 2.0)

    return mod


@case()
def clamp_is_a_minimum_of_a_maximum():
    def mod(score, b, h, q_idx, kv_idx):
        return score.clamp(-1.0, 1.0)

    return mod


@case()
def minimum_of_integers_needs_no_nan_rule():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.minimum(q_idx, kv_idx)

    return mod


@case()
def sign_and_magnitude():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.sign(score) * torch.abs(score) + torch.sign(q_idx - kv_idx)

    return mod


@case()
def remainder_of_floats_floors_and_fmod_truncates():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.remainder(score, 3.0) + torch.fmod(score, 3.0)

    return mod


@case()
def floor_division_of_floats():
    def mod(score, b, h, q_idx, kv_idx):
        return score // 0.5

    return mod


@case()
def division_of_integers_that_rounds_toward_zero():
    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.div(q_idx - kv_idx, 3, rounding_mode="trunc") + torch.fmod(q_idx - kv_idx, 3)

    return mod


@case()
def true_division_of_integers_is_in_float32():
    def mod(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx) / 3

    return mod
