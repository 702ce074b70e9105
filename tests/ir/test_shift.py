"""Mods with shifted indices compute what the mods do at the shifted ones."""

from __future__ import annotations

import torch

from flexgen.capture.live import LiveMods
from flexgen.ir.evaluate import evaluate
from flexgen.ir.shift import shift_by_scalars, shift_indices
from flexgen.ir.simplify import simplify
from flexgen.ir.text import print_mods


def _mods(shift_b: int, shift_h: int, shift_q: int):
    slopes = torch.arange(8.0)

    def score(score, b, h, q_idx, kv_idx):
        b, h, q_idx = b + shift_b, h + shift_h, q_idx + shift_q
        return score * slopes[h] + (q_idx - kv_idx) * b

    def mask(b, h, q_idx, kv_idx):
        return q_idx + shift_q >= kv_idx

    return LiveMods(score, mask).current().captured


def test_each_index_is_read_from_its_start():
    plain, shifted = _mods(0, 0, 0), _mods(3, 4, 5)
    found, _ = shift_indices(plain.mods, plain.origins, {"b": 3, "h": 4, "q_idx": 5})
    assert simplify(found).mods == simplify(shifted.mods).mods != simplify(plain.mods).mods


def test_what_reads_no_shifted_index_stays_the_same_object():
    captured = LiveMods(None, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).current().captured
    mods, origins = shift_indices(captured.mods, captured.origins, {"b": 3, "h": 4, "q_idx": 0})
    assert mods == captured.mods
    assert print_mods(mods, origins) == print_mods(captured.mods, captured.origins)


def test_lines_and_names_of_the_user_stay():
    captured = _mods(0, 0, 0)
    text = print_mods(*shift_indices(captured.mods, captured.origins, {"h": 4}))
    assert "# return score * slopes[h] + (q_idx - kv_idx) * b" in text and "add(h, 4)" in text


def test_scalars_are_added_where_an_index_is_read():
    plain, shifted = _mods(0, 0, 0), _mods(0, 0, 5)
    mods, _ = shift_by_scalars(plain.mods, plain.origins, {"q_idx": "q_from", "kv_idx": "kv_from"})
    assert [scalar.name for scalar in mods.scalars] == ["q_from", "kv_from"]
    inputs = {"q_idx": torch.arange(9)[:, None], "kv_idx": torch.arange(9)}
    found = evaluate(mods.mask, inputs, {}, {"q_from": 12, "kv_from": 7})
    assert torch.equal(found, evaluate(shifted.mods.mask, inputs, {}, {}))


def test_only_scalars_that_are_read_are_declared():
    captured = LiveMods(None, lambda b, h, q_idx, kv_idx: kv_idx < 5).current().captured
    mods, _ = shift_by_scalars(captured.mods, captured.origins, {"q_idx": "q_from", "kv_idx": "kv_from"})
    assert [scalar.name for scalar in mods.scalars] == ["kv_from"]


def test_one_scalar_may_serve_both():
    plain = _mods(0, 0, 0)
    mods, _ = shift_by_scalars(plain.mods, plain.origins, {"q_idx": "start", "kv_idx": "start"})
    assert [scalar.name for scalar in mods.mask.scalars] == ["start"]
