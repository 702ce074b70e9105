"""How many blocks a derived table lists for each block that holds a live pair, over masks as they are used."""

from __future__ import annotations

from collections.abc import Callable

import attn_gym.masks as gym  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from flexgen.lowering.blocks import block_rule
from flexgen.lowering.facts import Tier
from tests.analysis.brute_force import Grid
from tests.analysis.test_public_masks import GYM, facts_of, read
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS
from tests.derived_tables.block_grid import Blocks, blocks_of

LENGTH = 1024
SIZES = ((32, 32), (64, 32), (64, 64), (128, 64))
WORST = 1.2
SHAPE = Shape(2, 4, 2, 75, 75)
Mask = Callable[..., Tensor]


def neighbourhood(sides: tuple[int, ...], radius: int) -> Mask:
    def mask(b, h, q, k):
        near = (q - q) == 0
        for place, side in enumerate(sides):
            step = int(torch.tensor(sides[place + 1 :]).prod())
            near = near & (((q // step % side) - (k // step % side)).abs() <= radius)
        return near

    return mask


def ragged_documents() -> Tensor:
    cuts = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(0))[:15].sort().values + 1
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([LENGTH])]).int()


def used_masks() -> dict[str, Mask]:
    offsets = ragged_documents()
    document = torch.searchsorted(offsets[1:], torch.arange(LENGTH), right=True).int()
    live = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    images = torch.tensor([[0, 100], [100, 700], [700, LENGTH]])
    return {
        "documents": lambda b, h, q, k: document[q] == document[k],
        "documents causal": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "documents by offsets": gym.generate_doc_mask_mod(gym.causal_mask, offsets),
        "dilated": lambda b, h, q, k: ((q - k).abs() <= 300) & ((q - k).abs() % 4 == 0),
        "strided": lambda b, h, q, k: (q >= k) & ((q - k < 128) | (k % 128 >= 120)),
        "stripes": lambda b, h, q, k: (q // 64) % 4 == (k // 64) % 4,
        "blocks of a table": lambda b, h, q, k: live[q // 64, k // 64],
        "neighbourhood 2d": neighbourhood((32, 32), 3),
        "neighbourhood 3d": neighbourhood((8, 8, 16), 1),
        "natten": gym.generate_natten(32, 32, 7, 7),
        "tiled natten": gym.generate_tiled_natten(32, 32, 7, 7, 8, 8),
        "morton natten": gym.generate_morton_natten(32, 32, 7, 7),
        "sliding tiles 2d": gym.generate_sta_mask_mod_2d((32, 32), (24, 24), (8, 8)),
        "sliding tiles 3d": gym.generate_sta_mask_mod_3d((16, 8, 8), (12, 4, 4), (4, 4, 4), LENGTH),
        "temporal heads": gym.generate_temporal_head_mask_mod(64, 16, 65),
        "block diffusion": gym.generate_block_diffusion_mask(LENGTH // 2, 32),
        "global tokens": gym.generate_global_sliding_window(16, torch.arange(LENGTH) % 333 == 0),
        "flamingo": gym.generate_vision_cross_attention_mask_mod(images, LENGTH // 3),
    }


USED = used_masks()


def classified(mask: Mask, grid: Grid, sizes: tuple[int, int]) -> Blocks:
    graph, reading = read(mask)
    buffers = {buffer.name: value for buffer, value in zip(graph.buffers, reading.buffers, strict=True)}
    grid = Grid(grid.q_len, grid.kv_len, grid.batches, grid.heads, buffers)
    blocks = blocks_of(block_rule(graph, reading.captured.origins), graph.root, grid, *sizes)
    blocks.check()
    return blocks


@pytest.mark.parametrize("name", list(USED))
def test_masks_in_use_list_hardly_more_than_the_live_blocks(name: str) -> None:
    for sizes in SIZES:
        blocks = classified(USED[name], Grid(LENGTH, LENGTH), sizes)
        assert blocks.ratio <= WORST, f"{blocks.ratio:.2f} of the live blocks at {sizes}"
        assert blocks.full.equal(blocks.whole), sizes


@pytest.mark.parametrize("case", [case for case in MASKS if case.fits(SHAPE)], ids=lambda case: case.name)
def test_blocks_of_the_corpus_are_classified_soundly(case: Case) -> None:
    mask = case.build(SHAPE, torch.device("cpu"))
    for sizes in ((16, 16), (32, 8), (7, 5)):
        classified(mask, Grid(SHAPE.Lq, SHAPE.Lk, SHAPE.B, SHAPE.Hq), sizes)


@pytest.mark.parametrize("name", list(GYM))
def test_blocks_of_attn_gym_masks_are_classified_soundly(name: str) -> None:
    queries = 48 if name == "jetspec tree" else 64
    for sizes in ((16, 16), (8, 4), (7, 5)):
        classified(GYM[name], Grid(queries, 64), sizes)


def test_masks_in_use_are_those_that_want_a_table() -> None:
    wanting = {name for name, mask in USED.items() if facts_of(mask).tier in (Tier.BLOCK_TABLE, Tier.DENSE)}
    assert wanting == set(USED)
