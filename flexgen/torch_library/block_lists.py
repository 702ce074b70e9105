"""A BlockMask's lists and sizes as an operator's arguments, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.runtime.block_table import refuse_slice_without_mask_mod
from flexgen.runtime.derived_table import DerivedTable
from flexgen.torch_library.refuse import refuse

Lists = list[torch.Tensor | None]

NAMES = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


@dataclass(frozen=True, slots=True)
class ListedBlocks:
    """A block mask without its mask_mod, under the names that torch's BlockMask has."""

    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int]
    kv_num_blocks: torch.Tensor | None
    kv_indices: torch.Tensor | None
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    q_num_blocks: torch.Tensor | None
    q_indices: torch.Tensor | None
    full_q_num_blocks: torch.Tensor | None
    full_q_indices: torch.Tensor | None


def lists_of(block_table: Any) -> tuple[Lists, list[int]]:
    """Return a block mask's lists in the order of `NAMES`, and its lengths and block sizes; empty lists for None.

    Raises:
        UnsupportedProblemError: a table that flexgen derived, or a slice without a mask_mod.
    """
    if block_table is None:
        return [], []
    if isinstance(block_table, DerivedTable):
        refuse(
            "a table that attention.block_table made was passed to a call that is being traced, or is made of DTensors",
            why="it holds for the tensors it was made from, which an operator of a graph cannot check",
            fix="leave block_table out: the operator derives the table itself, and keeps it while it holds",
        )
    refuse_slice_without_mask_mod(block_table)
    lists = [getattr(block_table, name, None) for name in NAMES]
    return lists, [*block_table.seq_lengths, *block_table.BLOCK_SIZE]


def block_mask_of(lists: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> ListedBlocks | None:
    """Return the block mask whose lists and sizes these are."""
    if not lists:
        return None
    q_len, kv_len, *block_size = sizes
    named = dict(zip(NAMES, lists, strict=True))
    return ListedBlocks((q_len, kv_len), (block_size[0], block_size[1]), **named)
