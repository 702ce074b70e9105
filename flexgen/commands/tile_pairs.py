"""How many live pairs chosen tiles of a mask hold, by its captured graph."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.commands.mask_subject import MaskSubject

_PAIRS_AT_ONCE = 1 << 21


def count_in_tiles(mask: MaskSubject, chosen: Tensor, rows: int, columns: int) -> Tensor:
    """Count the live pairs of some tiles.

    Args:
        chosen: bool [query tiles, key tiles].
        rows, columns: queries and keys of a tile.

    Returns:
        int64 of the same shape; 0 where not chosen.
    """
    pairs = torch.zeros(chosen.shape, dtype=torch.int64)
    if mask.graph is None:
        return pairs
    q_tiles, kv_tiles = chosen.nonzero(as_tuple=True)
    step = max(_PAIRS_AT_ONCE // (rows * columns), 1)
    for q, k in zip(*(torch.split(tiles, step) for tiles in (q_tiles, kv_tiles)), strict=True):
        q_idx = (q[:, None] * rows + torch.arange(rows))[:, :, None]
        kv_idx = (k[:, None] * columns + torch.arange(columns))[:, None, :]
        inside = (q_idx < mask.shape.Lq) & (kv_idx < mask.shape.Lk)
        live = mask.value(mask.graph.root, {"q_idx": q_idx, "kv_idx": kv_idx})
        pairs[q, k] = (live & inside).sum((1, 2))
    return pairs
