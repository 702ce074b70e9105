"""Every mask and score mod of the corpus: gradients of query, key, value and of every captured tensor."""

from __future__ import annotations

import pytest
import torch

from tests.backward.run import check_backward, found, training_inputs
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES

SQUARE = Shape(2, 4, 2, 48, 48)
OBLONG = Shape(2, 4, 2, 35, 53)
TILES = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)


def paired(masks, scores):
    """Return pairs in which every case of the longer corpus occurs once."""
    masks, scores = list(masks), list(scores)
    count = max(len(masks), len(scores))
    return [(masks[i % len(masks)], scores[(i * 7 + 3) % len(scores)]) for i in range(count)]


def shape_for(*cases):
    return OBLONG if all(case.fits(OBLONG) for case in cases) else SQUARE


@pytest.mark.parametrize("case", list(SCORES), ids=lambda case: case.name)
def test_every_score_mod(device, case):
    shape = shape_for(case)
    check_backward(training_inputs(shape, device), found(case.build(shape, device)))


@pytest.mark.parametrize(("mask", "score"), paired(MASKS, SCORES), ids=lambda case: case.name)
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
