"""What is told about a score_mod is so: its derivative, its inputs, and how large it may get."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.explain_score import score_facts

table = torch.rand(8)
factor = 2.0


def facts(mod, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    query = torch.empty(1, 8, 128, 64, dtype=dtype, device="meta")
    lowered = flexgen.compile(mod).lower(query, query, query, target="sm_80")
    return dict(score_facts(lowered.understood.mods.score, dtype))


@pytest.mark.parametrize(
    ("mod", "words", "inputs"),
    [
        (lambda score, b, h, q, kv: score + table[h], "adds to the score", "score, h"),
        (lambda score, b, h, q, kv: score * (h + 1), "is affine in the score", "score, h"),
        (lambda score, b, h, q, kv: torch.tanh(score), "is no affine function of the score", "score"),
        (lambda score, b, h, q, kv: (q - kv) * 0.5, "replaces the score", "q_idx, kv_idx"),
    ],
)
def test_the_change_is_that_of_its_derivative(mod, words: str, inputs: str) -> None:
    found = facts(mod)
    assert words in found["score"] and found["score depends on"] == inputs


def test_what_it_reads_and_what_follows_from_it() -> None:
    found = facts(lambda score, b, h, q, kv: score + table[kv % 8])
    assert found["score reads"] == "table (float32, 1-dimensional)"
    assert "read for each key" in found["score size"] and "whole row may be -inf" in found["score -inf"]
    found = facts(lambda score, b, h, q, kv: 20 * torch.tanh(score / 20))
    assert "score reads" not in found
    assert found["score size"].startswith("moderate") and found["score -inf"].startswith("never")


def test_without_a_score_mod_that_is_told() -> None:
    assert facts(None) == {"score": "no score_mod: the scaled product of query and key"}
