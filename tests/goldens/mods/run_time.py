"""Captured numbers: constants at first, arguments once they have changed."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import case


@case()
def number_seen_once_is_a_constant():
    window = 128

    def mod(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    return mod


@case()
def number_that_changed_is_an_argument():
    window = 128

    def mod(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    yield mod
    window = 256


@case()
def float_that_changed_is_an_argument():
    cap = 20.0

    def mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    yield mod
    cap = 30.0


@case()
def number_that_decides_a_branch_stays_constant():
    reach = 0

    def mod(b, h, q_idx, kv_idx):
        if reach > 1:
            return (q_idx - kv_idx).abs() < reach
        return q_idx >= kv_idx

    yield mod
    reach = 2


@case()
def division_by_an_argument_floors_by_a_helper():
    block = 16

    def mod(b, h, q_idx, kv_idx):
        return q_idx // block >= kv_idx // block

    yield mod
    block = 32
