"""The analysis of captured masks, those of the corpus and of attn-gym, agrees with brute force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attn_gym.masks as gym  # type: ignore[import-untyped]
import pytest
import torch

from flexgen.capture.live import LiveMods, Reading
from flexgen.ir.graph import Graph
from flexgen.lowering.facts import MaskFacts, Tier, analyse_mask
from tests.analysis.brute_force import Grid, check_mask
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS

SHAPE = Shape(2, 4, 2, 36, 36)
SIDE = 64
OFFSETS = torch.tensor([0, 10, 25, SIDE], dtype=torch.int32)

Mod = Callable[..., torch.Tensor]


def _flags(size: int, *live: int) -> torch.Tensor:
    found = torch.zeros(size, dtype=torch.bool)
    found[list(live)] = True
    return found


def _gym_masks() -> dict[str, Mod]:
    ancestors = gym.build_tree_ancestor_matrix([-1, *(node // 2 for node in range(SIDE - 17))], device="cpu")
    return {
        "dilated": gym.generate_dilated_sliding_window(4, 2),
        "documents": gym.generate_doc_mask_mod(gym.causal_mask, OFFSETS),
        "packed documents": gym.generate_packed_causal_doc_mask_mod(OFFSETS),
        "flamingo": gym.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 9], [9, 30]]), SIDE // 2),
        "global": gym.generate_global_sliding_window(4, _flags(SIDE, 0, 17)),
        "jetspec training": gym.generate_jetspec_training_mask_mod(10, 5),
        "jetspec tree": gym.generate_jetspec_tree_causal_mask_mod(16, ancestors),
        "prefix": gym.generate_prefix_lm_mask(10),
        "shared prefix": gym.generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([0, 0, 0])),
        "sliding": gym.generate_sliding_window(10),
        "tiles 2d": gym.generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2)),
        "tiles 3d": gym.generate_sta_mask_mod_3d((4, 4, 2), (2, 2, 2), (2, 2, 1), 16),
        "spatial heads": gym.generate_spatial_head_mask_mod(9, 3, 17, 1, round_width=4),
        "temporal heads": gym.generate_temporal_head_mask_mod(9, 3, 17),
        "natten": gym.generate_natten(8, 8, 3, 3),
        "tiled natten": gym.generate_tiled_natten(8, 8, 3, 3, 4, 4),
        "morton natten": gym.generate_morton_natten(8, 8, 3, 3),
        "batchified": gym.batchify_mask_mod(gym.causal_mask, 12),
        "block diffusion": gym.generate_block_diffusion_mask(SIDE // 2, 4),
        "selected tiles": gym.generate_vsa_mask_mod(torch.tensor([[[[0, 2], [1, 3], [0, 0], [3, 1]]]]), 16),
    }


GYM: Mapping[str, Mod] = MappingProxyType(_gym_masks())
CLOSED = {"prefix", "sliding", "spatial heads", "batchified", "jetspec training"}
ROW_REDUCED = {"packed documents", "shared prefix", "selected tiles"}


def read(mask: Mod) -> tuple[Graph, Reading]:
    reading = LiveMods(None, mask).current()
    assert reading.captured.mods.mask is not None
    return reading.captured.mods.mask, reading


def facts_of(mask: Mod) -> MaskFacts:
    graph, reading = read(mask)
    return analyse_mask(graph, origins=reading.captured.origins)


def check(mask: Mod, q_len: int, kv_len: int, batches: int, heads: int) -> None:
    graph, reading = read(mask)
    buffers = {buffer.name: value for buffer, value in zip(graph.buffers, reading.buffers, strict=True)}
    check_mask(graph.root, Grid(q_len, kv_len, batches, heads, buffers), analyse_mask(graph))


@pytest.mark.parametrize("case", [case for case in MASKS if case.fits(SHAPE)], ids=lambda case: case.name)
def test_corpus_masks_are_analysed_soundly(case: Case) -> None:
    check(case.build(SHAPE, torch.device("cpu")), SHAPE.Lq, SHAPE.Lk, SHAPE.B, SHAPE.Hq)


@pytest.mark.parametrize("name", list(GYM))
def test_attn_gym_masks_are_analysed_soundly(name: str) -> None:
    queries = SIDE - 16 if name == "jetspec tree" else SIDE
    check(GYM[name], queries, SIDE, 1, 1)


@pytest.mark.parametrize("name", list(GYM))
def test_attn_gym_masks_have_the_tier_that_their_structure_allows(name: str) -> None:
    tier = Tier.CLOSED_FORM if name in CLOSED else Tier.ROW_REDUCED if name in ROW_REDUCED else Tier.BLOCK_TABLE
    facts = facts_of(GYM[name])
    assert facts.tier is tier, facts.because
