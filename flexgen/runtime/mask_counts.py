"""Count the live entries in each block of a mask, exactly, without ever holding the whole mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch.nn.functional import pad

from flexgen.runtime.mask_evaluation import BoxMask, IndexBox

# Entries of the mask evaluated at once; a mod's int64 intermediates take eight bytes for each of them.
# CPU: measured with torch 2.13 on 2 cores, where 2**22 already takes thrice as long. Accelerators: a guess that
# bounds an intermediate to 256 MiB and keeps launches few.
CPU_TILE_ENTRIES = 1 << 21
ACCELERATOR_TILE_ENTRIES = 1 << 25


@dataclass(frozen=True, slots=True)
class MaskGrid:
    """The extents of a mask and of its blocks."""

    batch: int
    heads: int
    query_length: int
    key_length: int
    q_block_size: int
    kv_block_size: int

    @property
    def num_q_blocks(self) -> int:
        return -(-self.query_length // self.q_block_size)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.key_length // self.kv_block_size)


def count_live_entries(
    mask: BoxMask, grid: MaskGrid, device: torch.device, tile_entries: int | None = None
) -> torch.Tensor:
    """Return the number of (q_idx, kv_idx) pairs allowed in each block.

    Args:
        mask: evaluated box by box.
        grid: the extents; any of them may be 0.
        device: where the mask is evaluated.
        tile_entries: an upper bound on the entries evaluated at once; None for the device's own.

    Returns:
        int64 [batch, heads, num_q_blocks, num_kv_blocks]; an expanded view along b or h if the mask is the same there.

    Raises:
        CaptureError: the mask_mod raised, branched on an index, or did not return one bool.
    """
    shape = (grid.batch, grid.heads, grid.num_q_blocks, grid.num_kv_blocks)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.int64, device=device)
    limit = tile_entries or (CPU_TILE_ENTRIES if device.type == "cpu" else ACCELERATOR_TILE_ENTRIES)
    batch_matters, head_matters = mask.batch_and_head_matter(device)
    batch = grid.batch if batch_matters else 1
    heads = grid.heads if head_matters else 1
    counts = torch.zeros(batch, heads, *shape[2:], dtype=torch.int64, device=device)
    for box in _tiles(grid, batch, heads, limit):
        _add_counts(counts, mask.on(box, device), box, grid)
    return counts.expand(shape)


def _tiles(grid: MaskGrid, batch: int, heads: int, limit: int) -> Iterator[IndexBox]:
    """Cover the mask with boxes of at most `limit` entries, filling the innermost axis first."""
    kv_spans = _spans(grid.key_length, grid.kv_block_size, limit)
    limit //= len(kv_spans[0])
    q_spans = _spans(grid.query_length, grid.q_block_size, limit)
    limit //= len(q_spans[0])
    h_spans = _spans(heads, 1, limit)
    b_spans = _spans(batch, 1, limit // len(h_spans[0]))
    for b, h, q_idx, kv_idx in product(b_spans, h_spans, q_spans, kv_spans):
        yield IndexBox(b, h, q_idx, kv_idx)


def _spans(length: int, block: int, limit: int) -> list[range]:
    """Split [0, length) into ranges of at most `limit`: each is some whole blocks, or lies in one block."""
    limit = max(limit, 1)
    if limit >= length:
        return [range(length)]
    if limit >= block:
        step = limit // block * block
        return [range(start, min(start + step, length)) for start in range(0, length, step)]
    blocks = (range(start, min(start + block, length)) for start in range(0, length, block))
    return [whole[start : start + limit] for whole in blocks for start in range(0, len(whole), limit)]


def _add_counts(counts: torch.Tensor, allowed: torch.Tensor, box: IndexBox, grid: MaskGrid) -> None:
    """Add the live entries of one tile to its blocks."""
    per_column_block = _sum_groups(allowed, grid.kv_block_size)
    per_block = _sum_groups(per_column_block.transpose(2, 3), grid.q_block_size).transpose(2, 3)
    q_block = box.q_idx.start // grid.q_block_size
    kv_block = box.kv_idx.start // grid.kv_block_size
    rows = slice(q_block, q_block + per_block.shape[2])
    columns = slice(kv_block, kv_block + per_block.shape[3])
    counts[box.b.start : box.b.stop, box.h.start : box.h.stop, rows, columns] += per_block


def _sum_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """Sum the last axis in groups of `group`, the last one possibly short: [..., n] -> [..., ceil(n / group)]."""
    group = min(group, values.shape[-1])
    short = -values.shape[-1] % group
    padded = pad(values, (0, short)) if short else values
    return padded.reshape(*padded.shape[:-1], -1, group).sum(-1)
