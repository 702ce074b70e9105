"""The mask functions of attn-gym, with parameters as their papers use them, for one sequence length."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attn_gym.masks as gym  # type: ignore[import-untyped]
import torch

Mod = Callable[..., torch.Tensor]

PREFIX_OF_TREE = 0.75  # of the keys of a tree, which is verified after this share of its sequence


def gym_masks(length: int) -> Mapping[str, Mod]:
    """Return the masks by name.

    Args:
        length: queries and keys, a power of two, 1024 at least; of `gym_queries` where a mask has fewer queries.
    """
    side = 1 << (length.bit_length() // 2)  # of a canvas of `length` pixels, side x (length / side)
    canvas = (side, length // side)
    offsets = _offsets(length)
    is_global = torch.zeros(length, dtype=torch.bool)
    is_global[[0, 1, length // 2]] = True
    images = _images(length)
    frame = length // 8
    return {
        "dilated": gym.generate_dilated_sliding_window(256, 4),
        "documents": gym.generate_doc_mask_mod(gym.causal_mask, offsets),
        "packed documents": gym.generate_packed_causal_doc_mask_mod(offsets),
        "flamingo": gym.generate_vision_cross_attention_mask_mod(images, length // len(images)),
        "global": gym.generate_global_sliding_window(256, is_global),
        "jetspec training": gym.generate_jetspec_training_mask_mod(length // 4, 16),
        "jetspec tree": gym.generate_jetspec_tree_causal_mask_mod(int(length * PREFIX_OF_TREE), _tree(length)),
        "prefix": gym.generate_prefix_lm_mask(length // 4),
        "shared prefix": gym.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 0, 3, 3, 3, 3])),
        "sliding": gym.generate_sliding_window(256),
        "tiles 2d": gym.generate_sta_mask_mod_2d(canvas, (24, 24), (8, 8)),
        "tiles 3d": gym.generate_sta_mask_mod_3d((8, 16, length // 256), (4, 8, 4), (2, 4, 2), 128),
        "spatial heads": gym.generate_spatial_head_mask_mod(226, 8, frame, 2, round_width=128),
        "temporal heads": gym.generate_temporal_head_mask_mod(226, 8, frame, 2),
        "natten": gym.generate_natten(*canvas, 13, 13),
        "tiled natten": gym.generate_tiled_natten(*canvas, 13, 13, 8, 8),
        "morton natten": gym.generate_morton_natten(*_square(length), 13, 13),
        "batchified": gym.batchify_mask_mod(gym.causal_mask, 500),
        "block diffusion": gym.generate_block_diffusion_mask(length // 2, 32),
        "selected tiles": gym.generate_vsa_mask_mod(_selected(length // 64), 64),
    }


def gym_queries(name: str, length: int) -> int:
    """Return how many queries a mask has."""
    return length - int(length * PREFIX_OF_TREE) if name == "jetspec tree" else length


def _offsets(length: int) -> torch.Tensor:
    """Return where seven documents of uneven lengths start, and the end."""
    shares = (0.0, 0.11, 0.17, 0.4, 0.42, 0.77, 0.9, 1.0)
    return torch.tensor([int(share * length) for share in shares], dtype=torch.int32)


def _images(length: int) -> torch.Tensor:
    """Return from and up to which token of text each of eight images is seen."""
    starts = torch.arange(8) * length // 8
    return torch.stack([starts, (starts + length // 5).clamp(max=length)], 1)


def _square(length: int) -> tuple[int, int]:
    side = 1 << int(math.log2(length) // 2)
    return side, side


def _tree(length: int) -> torch.Tensor:
    nodes = length - int(length * PREFIX_OF_TREE)
    # A binary heap: the parent of node n is (n - 1) // 2.
    return gym.build_tree_ancestor_matrix([-1, *((node - 1) // 2 for node in range(1, nodes))], device="cpu")


def _selected(tiles: int) -> torch.Tensor:
    """Return four tiles of keys for each tile of queries, ascending."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tiles, tiles, generator=generator).topk(4).indices.sort().values
    return chosen[None, None]
