"""Floating-point functions."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import case


@case()
def softcap_in_half_precision_uses_the_hardware_tanh():
    def mod(score, b, h, q_idx, kv_idx):
        return 20.0 * torch.tanh(score / 20.0)

    return mod


@case(dtype=torch.float32)
def softcap_in_float32_uses_the_exact_tanh():
    def mod(score, b, h, q_idx, kv_idx):
        return 20.0 * torch.tanh(score / 20.0)

    return mod


@case(options={"FAST_TANH": False})
def fast_tanh_can_be_refused():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score)

    return mod


@case()
def exponentials_and_logarithms():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.exp(score) + torch.exp2(score) - torch.log(score.abs()) - torch.log2(score.abs())

    return mod


@case()
def functions_that_keep_precision_near_zero():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.expm1(score) + torch.log1p(score.abs())

    return mod


@case()
def powers_and_roots():
    def mod(score, b, h, q_idx, kv_idx):
        return score**2.5 + torch.sqrt(score.abs()) + torch.rsqrt(score.abs() + 1.0)

    return mod


@case()
def small_whole_powers_are_products():
    def mod(score, b, h, q_idx, kv_idx):
        return score**2 + score**3

    return mod


@case()
def angles():
    def mod(score, b, h, q_idx, kv_idx):
        angle = (q_idx - kv_idx) * 0.1
        return score * torch.cos(angle) + torch.sin(angle)

    return mod


@case()
def gates():
    def mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(score) + torch.erf(score)

    return mod


@case()
def rounding_in_four_directions():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.floor(score) + torch.ceil(score) + torch.trunc(score) + torch.round(score)

    return mod
