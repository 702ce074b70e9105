"""A block table's lists as the forward kernel takes them, and the promise that they have no gaps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from flexgen.errors import OptionError
from flexgen.runtime.block_table import BlockTable
from flexgen.runtime.derived_table import DerivedTable


def table_lists(table: BlockTable) -> dict[str, torch.Tensor]:
    """Return the forward kernel's lists by name."""
    lists = {"kv_num_blocks": table.kv_num_blocks, "kv_indices": table.kv_indices}
    if table.full_kv_num_blocks is not None and table.full_kv_indices is not None:
        lists |= {"full_kv_num_blocks": table.full_kv_num_blocks, "full_kv_indices": table.full_kv_indices}
    return lists


def check_contiguous(table: BlockTable) -> None:
    """Check that each row's listed blocks are consecutive; waits for the device.

    Raises:
        OptionError: a list has a gap; names the first.
    """
    lists = table_lists(table)
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        if counts in lists and lists[indices].device.type != "meta":
            _check_list(counts, indices, lists[counts], lists[indices])


def _check_list(count_name: str, name: str, counts: torch.Tensor, indices: torch.Tensor) -> None:
    width = indices.shape[-1]
    if width < 2:
        return
    position = torch.arange(1, width, device=indices.device)
    gap = (indices[..., 1:] - indices[..., :-1] != 1) & (position < counts[..., None])
    if bool(gap.any()):
        b, h, row, at = (int(i) for i in gap.nonzero()[0])
        raise OptionError(
            f"BLOCKS_ARE_CONTIGUOUS=True, but {name}[{b}, {h}, {row}] has a gap after entry {at}",
            why=f"its {int(counts[b, h, row])} blocks ({count_name}) are not consecutive, so blocks would be skipped",
            fix="drop BLOCKS_ARE_CONTIGUOUS",
        )


def table_form(block_mask: Any) -> tuple[Hashable, ...]:
    """Return what identifies a block mask's lists; the caller keeps the block mask alive with what it derives.

    Of a derived table, whose lists are read anew at each call, the form and extents.
    """
    if isinstance(block_mask, DerivedTable):
        return (block_mask.form, block_mask.sizes, id(block_mask.owner))
    lists = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "mask_mod")
    sizes = (str(getattr(block_mask, "BLOCK_SIZE", None)), str(getattr(block_mask, "seq_lengths", None)))
    return (*(id(getattr(block_mask, name, None)) for name in lists), *sizes)


def column_lists(table: BlockTable) -> dict[str, torch.Tensor]:
    """Return the lists by columns of blocks, for kernels whose programs own keys; derived where they are missing."""
    sizes = (table.num_q_blocks, table.num_kv_blocks)
    counts, indices = table.q_num_blocks, table.q_indices
    if counts is None or indices is None:
        counts, indices = _transposed(table.kv_num_blocks, table.kv_indices, *sizes)
    lists = {"q_num_blocks": counts, "q_indices": indices}
    if table.full_kv_num_blocks is None or table.full_kv_indices is None:
        return lists
    counts, indices = table.full_q_num_blocks, table.full_q_indices
    if counts is None or indices is None:
        counts, indices = _transposed(table.full_kv_num_blocks, table.full_kv_indices, *sizes)
    return lists | {"full_q_num_blocks": counts, "full_q_indices": indices}


def _transposed(
    counts: torch.Tensor, indices: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn lists by rows [B, H, rows(, width)] into lists by columns, without waiting for the device."""
    counts, indices = counts[:, :, :rows], indices[:, :, :rows]
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    dense = counts.new_zeros((*counts.shape, columns + 1))
    dense.scatter_(-1, torch.where(listed, indices, columns).long(), 1)  # unused entries go to an extra column
    by_column = dense[..., :columns].transpose(-1, -2)
    order = torch.argsort(by_column, dim=-1, descending=True, stable=True)
    return by_column.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
