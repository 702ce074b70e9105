"""Block masks made by kernels list exactly the blocks that torch lists."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

import flexgen
from flexgen.block_states import BlockStates
from flexgen.runtime.mask_counts import MaskGrid, count_live_entries
from flexgen.runtime.mask_evaluation import CalledMask
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS
from tests.derived_tables.test_forward import documents, packed

SHAPE = Shape(2, 4, 2, 75, 90)
STATES = BlockStates()
Q_SIZE, KV_SIZE = 16, 32


@pytest.mark.parametrize("case", [case for case in MASKS if case.fits(SHAPE)], ids=lambda case: case.name)
def test_states_are_those_of_counting_live_pairs(case: Case, device: torch.device) -> None:
    mask = case.build(SHAPE, device)
    place = torch.empty(0, device=device).device
    grid = MaskGrid(SHAPE.B, SHAPE.Hq, SHAPE.Lq, SHAPE.Lk, Q_SIZE, KV_SIZE)
    states = STATES.of(mask, grid, place)
    counts = count_live_entries(CalledMask(mask), grid, place)
    assert states is not None
    assert states.equal(((counts > 0).to(torch.int8) + (counts == Q_SIZE * KV_SIZE)).to(torch.int8))


def test_what_kernels_do_not_take_is_left_to_evaluation(device: torch.device) -> None:
    mask = documents(packed(90, device))
    for size in (24, 512):
        assert STATES.of(mask, MaskGrid(1, 1, 90, 90, size, size), device) is None
    assert STATES.of(lambda b, h, q, k: q.sort().values == k, MaskGrid(1, 1, 90, 90, 16, 16), device) is None


def lists(block_mask: BlockMask) -> list[torch.Tensor]:
    """Return the defined part of each list: entries past a row's count may be anything."""
    found = []
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(block_mask, f"{kind}_num_blocks")
        indices = getattr(block_mask, f"{kind}_indices")
        used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        found += [counts, torch.where(used, indices, -1)]
    return found


@pytest.mark.gpu
def test_a_large_block_mask_equals_that_of_torch() -> None:
    length = 20000
    document_id = packed(length, torch.device("cuda"), parts=7)

    def mask(b, h, q_idx, kv_idx):
        return (document_id[q_idx] == document_id[kv_idx]) & (q_idx >= kv_idx) & ((q_idx + kv_idx) % 3 > h)

    ours = flexgen.create_block_mask(mask, None, 2, length, length, "cuda")
    theirs = torch_create_block_mask(mask, None, 2, length, length, "cuda")
    for mine, other in zip(lists(ours), lists(theirs), strict=True):
        assert mine.equal(other)
