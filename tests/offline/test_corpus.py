"""Every mask and score mod of the corpus becomes machine code: one kernel for each mask, with a score mod beside it."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch

import flexgen
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES
from tests.offline.facts import compile_table, compiled

SHAPE = Shape(B=2, Hq=4, Hkv=2, Lq=200, Lk=200)  # no multiple of a tile, so that every load is masked
HEAD_DIM = 64
SMALL_TILE = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}  # is assembled quickly
PAIRS = tuple(zip_longest(MASKS, SCORES))

each_pair = pytest.mark.parametrize(
    ("mask", "score"), PAIRS, ids=["-".join(case.name for case in pair if case) for pair in PAIRS]
)


@each_pair
def test_everyday_target(mask: Case | None, score: Case | None) -> None:
    compile_pair(mask, score, "sm_90")


@pytest.mark.slow
@each_pair
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_main_target(mask: Case | None, score: Case | None, target: str) -> None:
    compile_pair(mask, score, target)


def compile_pair(mask: Case | None, score: Case | None, target: str) -> None:
    mask_mod, score_mod = (case.build(SHAPE, torch.device("cpu")) if case else None for case in (mask, score))
    attention = flexgen.compile(score_mod, mask_mod, SMALL_TILE)
    query = torch.empty(SHAPE.B, SHAPE.Hq, SHAPE.Lq, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    key = query[:, : SHAPE.Hkv]
    lowered = attention.lower(query, key, key, target=target)
    compiled(lowered)
    compile_table(lowered)


def test_the_shape_fits_every_case() -> None:
    assert [case.name for pair in PAIRS for case in pair if case and not case.fits(SHAPE)] == []
