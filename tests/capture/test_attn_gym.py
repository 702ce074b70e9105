"""Every public mask and score mod of attn_gym is captured and means what it means in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.capture.meaning import SHAPE, assert_same_meaning

masks = pytest.importorskip("attn_gym.masks")
mods = pytest.importorskip("attn_gym.mods")
Mod = Callable[..., object]

B, H, Q, KV = SHAPE


def _mask_cases() -> dict[str, Callable[[], Mod]]:
    from attn_gym.masks import batchify, block_diffusion, flamingo, jetspec, shared_prefix, svg, vsa

    offsets = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    return {
        "causal": lambda: masks.causal_mask,
        "batchify": lambda: batchify.batchify_mask_mod(masks.causal_mask, 3),
        "block_diffusion": lambda: block_diffusion.generate_block_diffusion_mask(4, 2),
        "sliding_window": lambda: masks.generate_sliding_window(2),
        "dilated": lambda: masks.generate_dilated_sliding_window(4, 2),
        "document": lambda: masks.generate_doc_mask_mod(masks.causal_mask, offsets),
        "packed document": lambda: masks.document_mask.generate_packed_causal_doc_mask_mod(offsets),
        "flamingo": lambda: flamingo.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 3], [2, 5]]), 4),
        "global sliding window": lambda: masks.global_sliding_window.generate_global_sliding_window(
            2, torch.arange(8) % 3 == 0
        ),
        "jetspec tree": lambda: jetspec.generate_jetspec_tree_causal_mask_mod(2, torch.ones(5, 5).tril().bool()),
        "jetspec training": lambda: jetspec.generate_jetspec_training_mask_mod(2, 3),
        "natten": lambda: masks.generate_natten(3, 3, 3, 3),
        "tiled natten": lambda: masks.generate_tiled_natten(4, 4, 3, 3, 2, 2),
        "morton natten": lambda: masks.generate_morton_natten(4, 4, 3, 3),
        "prefix lm": lambda: masks.generate_prefix_lm_mask(3),
        "shared prefix": lambda: shared_prefix.generate_shared_prefix_mask_mod(
            offsets, torch.tensor([0, 0, 0], dtype=torch.int32)
        ),
        "sta": lambda: masks.sta.generate_sta_mask_mod_2d((6, 6), (6, 6), (2, 2)),
        "svg spatial": lambda: svg.generate_spatial_head_mask_mod(2, 2, 3, 1),
        "svg temporal": lambda: svg.generate_temporal_head_mask_mod(2, 2, 3, 1),
        "vsa": lambda: vsa.generate_vsa_mask_mod(torch.arange(B * H * 3 * 2).view(B, H, 3, 2) % 4, 2),
        "vsa padding": lambda: vsa.generate_vsa_padding_mask_mod(torch.tensor([2, 1, 2, 2]), 2),
    }


def _score_cases() -> dict[str, Callable[[], Mod]]:
    distances = torch.arange(B * Q * KV).view(B, Q, KV).to(torch.int32) % 4
    path_types = torch.arange(B * Q * KV * 2).view(B, Q, KV, 2).to(torch.int32) % 3
    return {
        "activation": lambda: mods.generate_activation_score_mod(torch.sigmoid),
        "activation gelu": lambda: mods.generate_activation_score_mod(),
        "alibi": lambda: mods.generate_alibi_bias(H),
        "graphormer spatial": lambda: mods.generate_graphormer_spatial_bias(torch.randn(H, 4), distances),
        "graphormer edge": lambda: mods.generate_graphormer_edge_bias(torch.randn(H, 2, 3), path_types, distances),
        "mla rope": lambda: mods.generate_mla_rope_score_mod(torch.randn(B, H, Q, 4), torch.randn(B, 1, KV, 4), H),
        "sandwich": lambda: mods.generate_sandwich_bias(H, 8),
        "softcap": lambda: mods.generate_tanh_softcap(20),
        "approximate softcap": lambda: mods.generate_tanh_softcap(20, approx=True),
    }


@pytest.mark.parametrize("name", _mask_cases())
def test_mask_means_what_it_means_in_torch(name: str) -> None:
    assert_same_meaning(_mask_cases()[name](), "mask")


@pytest.mark.parametrize("name", _score_cases())
def test_score_mod_means_what_it_means_in_torch(name: str) -> None:
    assert_same_meaning(_score_cases()[name](), "score")
