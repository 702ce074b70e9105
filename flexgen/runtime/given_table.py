"""A block mask as a call reads it: its lists, checked once, and what of them decides about kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch

from flexgen.runtime.block_table import BlockTable, read_block_mask
from flexgen.runtime.lists import check_contiguous

_LISTS = tuple(
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
)
_KEPT_AS = "_flexgen_table"  # on the block mask: what was read lives as long as it does


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents of a call that a block mask must fit."""

    batch: int
    query_heads: int
    query_length: int
    key_length: int
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class GivenTable:
    """A block mask that was read.

    Attributes:
        table: its lists.
        form: everything about them that kernels and launches depend on, but addresses and contents.
        read_of: what was read: sizes, what was checked and, by identity, the mask's lists.
    """

    table: BlockTable
    form: Hashable
    read_of: tuple[Any, ...]


def given_table(block_mask: Any, sizes: Sizes, *, contiguous: bool) -> GivenTable:
    """Return a block mask as a call of some sizes reads it; the same again while its lists are the same tensors.

    Args:
        contiguous: listed blocks were promised to be consecutive, which is checked once; waits for the device.

    Raises:
        As `read_block_mask`; OptionError: a promise does not hold.
    """
    read_of = _read_of(block_mask, sizes, contiguous)
    found: GivenTable | None = getattr(block_mask, _KEPT_AS, None)
    if isinstance(found, GivenTable) and _is_same(found.read_of, read_of):
        return found
    table = read_block_mask(
        block_mask,
        batch=sizes.batch,
        query_heads=sizes.query_heads,
        query_length=sizes.query_length,
        key_length=sizes.key_length,
        device=sizes.device,
    )
    if contiguous:
        check_contiguous(table)
    found = GivenTable(table, _form(table), read_of)
    if _shares_memory(table, read_of[3:]):  # a converted list would not follow what is written to the mask's
        with suppress(AttributeError, TypeError):  # an object without room for it is read at each call
            setattr(block_mask, _KEPT_AS, found)
    return found


def _shares_memory(table: BlockTable, lists: Sequence[Any]) -> bool:
    read = [getattr(table, name) for name in _LISTS]
    return all(one is None or one.data_ptr() == of.data_ptr() for one, of in zip(read, lists, strict=True))


def _read_of(block_mask: Any, sizes: Sizes, contiguous: bool) -> tuple[Any, ...]:
    lengths = getattr(block_mask, "seq_lengths", None), getattr(block_mask, "BLOCK_SIZE", None)
    lists = [getattr(block_mask, name, None) for name in _LISTS]
    return (
        (sizes, contiguous),
        lengths,
        getattr(block_mask, "mask_mod", None),
        *lists,
    )  # a slice's mask_mod says that it is one


def _is_same(read_of: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return read_of[:2] == now[:2] and all(one is other for one, other in zip(read_of[2:], now[2:], strict=True))


def _form(table: BlockTable) -> Hashable:
    found: list[Hashable] = []
    for field in fields(table):
        value = getattr(table, field.name)
        if isinstance(value, torch.Tensor):
            value = (value.shape, value.stride(), value.get_device(), value.data_ptr() & 15)
        found.append(value)
    return tuple(found)
