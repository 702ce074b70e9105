"""Every mask and score mod of the corpus: gradients of query, key, value and of every captured tensor."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, found, training_inputs
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES

SQUARE = Shape(2, 2, 1, 48, 48)
OBLONG = Shape(2, 2, 1, 35, 53)
TILES = {"BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16}


def paired(masks, scores):
    """Return pairs in which every case of the longer corpus occurs once."""
    masks, scores = list(masks), list(scores)
    count = max(len(masks), len(scores))
    return [(masks[i % len(masks)], scores[(i * 7 + 3) % len(scores)]) for i in range(count)]


def shape_for(*cases):
    return OBLONG if all(case.fits(OBLONG) for case in cases) else SQUARE


# Autograd makes these NaN: a branch of `where` that is not taken has an infinite derivative, and 0 * inf counts.
NAN_IN_TORCH = ("nan_and_infinity_tests",)


def test_branch_that_is_not_taken_adds_nothing(device):
    inputs = training_inputs(OBLONG, device)
    attention = flexgen.compile(SCORES["nan_and_infinity_tests"].build(OBLONG, device))
    for grad in torch.autograd.grad(attention(*inputs).sum(), list(inputs)):
        assert torch.isfinite(grad).all()


def usual(cases):
    return [case for case in cases if case.name not in NAN_IN_TORCH]


@pytest.mark.parametrize(("mask", "score"), paired(MASKS, usual(SCORES)), ids=lambda case: case.name)
def test_every_mask_with_a_score_mod(device, mask, score):
    """Tiles are small, so that ranges and their edges lie inside the lengths."""
    shape = shape_for(mask, score)
    inputs = training_inputs(shape, device)
    check_backward(inputs, found(score.build(shape, device)), mask.build(shape, device), options=TILES)


@pytest.mark.parametrize("case", list(MASKS)[::3], ids=lambda case: case.name)
def test_masks_in_half_precision(device, case):
    shape = shape_for(case)
    inputs = training_inputs(shape, device, dtype=torch.bfloat16)
    check_backward(inputs, None, case.build(shape, device), use_lse=True)


# In float32 whatever the inputs: of logarithms and the like, and of sums of many, torch's last bit is another.
FLOAT32_IN_ITSELF = ("alibi_from_head_index", "t5_bucketed_bias", "rope_distance", "log_distance", "dot_of_rows")
EXACT = paired(MASKS, [case for case in usual(SCORES) if case.name not in FLOAT32_IN_ITSELF])
SMALL = Shape(2, 2, 1, 18, 27)
SMALL_SQUARE = Shape(2, 2, 1, 20, 20)


def _sampled(pairs):
    """Leave four of five to the slow tests."""
    return [pair if at % 5 == 0 else pytest.param(*pair, marks=pytest.mark.slow) for at, pair in enumerate(pairs)]


@pytest.mark.parametrize(("mask", "score"), _sampled(EXACT), ids=lambda case: case.name)
def test_every_mask_with_a_score_mod_in_float64(mask, score):
    """Nothing is lost to rounding: gradients agree to ten digits with autograd of the dense computation."""
    device = torch.device("cpu")
    shape = SMALL if mask.fits(SMALL) and score.fits(SMALL) else SMALL_SQUARE
    inputs = training_inputs(shape, device, dtype=torch.float64, head_dim=8)
    check_backward(inputs, found(score.build(shape, device)), mask.build(shape, device), use_lse=True, options=TILES)
