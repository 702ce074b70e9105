"""Checks of what a call brings besides query, key and value: kv_lengths, page_table, k_scale and v_scale."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.runtime.wrappers import refuse_wrapper

SIDE_NAMES = ("kv_lengths", "page_table", "k_scale", "v_scale")
LENGTH_DTYPES = (torch.int32, torch.int64)
PAGE_MULTIPLE = 16  # keys: what tiles are made of

Side = torch.Tensor | float


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of a call that its other arguments must fit.

    Attributes:
        batch, kv_heads: sizes.
        rows: keys that lie one after the other: of the cache, or of a page.
        outer: the first dimension of key: batch, or number of pages.
        device: of the query.
    """

    batch: int
    kv_heads: int
    rows: int
    outer: int
    device: torch.device


def checked_sides(given: Mapping[str, Any], extents: Extents, *, validate: bool) -> dict[str, Side]:
    """Return the given arguments by name as kernels take them; numbers as floats.

    Args:
        validate: look at the numbers in kv_lengths too; waits for the device.

    Raises:
        ProblemTypeError: no tensor, or one of another dtype.
        UnsupportedProblemError: another shape or device; with `validate`, a number out of range.
    """
    sides: dict[str, Side] = {}
    for name, value in given.items():
        match name:
            case "kv_lengths":
                sides[name] = _checked_lengths(value, extents)
            case "page_table":
                sides[name] = _checked_pages(value, extents, has_lengths="kv_lengths" in given)
            case _:
                sides[name] = _checked_scale(name, value, extents)
    if validate:
        _check_contents(sides, extents)
    return sides


def room(sides: Mapping[str, Side], rows: int) -> int:
    """Return how many keys there is room for, of so many that lie one after the other."""
    table = sides.get("page_table")
    return table.shape[1] * rows if isinstance(table, torch.Tensor) else rows


def _checked_lengths(kv_lengths: Any, extents: Extents) -> torch.Tensor:
    if not isinstance(kv_lengths, torch.Tensor) or kv_lengths.dtype not in LENGTH_DTYPES:
        raise ProblemTypeError(
            f"kv_lengths is {_kind(kv_lengths)}, not an int32 or int64 tensor",
            why="kernels read it on the device, so that one launch serves every step",
            fix="pass torch.tensor([...], dtype=torch.int32, device=query.device)",
        )
    _check_shape("kv_lengths", kv_lengths, (extents.batch,), "each batch row has one number of keys")
    _check_device("kv_lengths", kv_lengths, extents)
    return kv_lengths


def _checked_pages(page_table: Any, extents: Extents, *, has_lengths: bool) -> torch.Tensor:
    if not isinstance(page_table, torch.Tensor) or page_table.dtype != torch.int32:
        raise ProblemTypeError(
            f"page_table is {_kind(page_table)}, not an int32 tensor", fix="convert it with .to(torch.int32)"
        )
    if page_table.dim() != 2 or page_table.shape[0] != extents.batch:
        raise UnsupportedProblemError(
            f"page_table has shape {tuple(page_table.shape)}, and the query has batch size {extents.batch}",
            why="row b lists the pages of batch row b, in the order of its keys",
            fix=f"pass a tensor of shape ({extents.batch}, max_pages)",
        )
    if page_table.shape[1] > 1 and page_table.stride(1) != 1:
        raise UnsupportedProblemError(
            "the rows of page_table are strided", why="kernels read them by address", fix="pass .contiguous()"
        )
    _check_device("page_table", page_table, extents)
    if extents.rows % PAGE_MULTIPLE or extents.rows == 0:
        raise UnsupportedProblemError(
            f"pages have {extents.rows} keys",
            why=f"tiles of keys are made of pages that are multiples of {PAGE_MULTIPLE}",
            fix="allocate key and value as [n_pages, Hkv, page_size, D] with such a page_size, or, with "
            'layout="bshd", as [n_pages, page_size, Hkv, D]',
        )
    if not has_lengths:
        raise UnsupportedProblemError(
            "page_table was passed without kv_lengths",
            why="the entries past a batch row's last page may hold anything",
            fix="pass kv_lengths, the number of keys of each batch row",
        )
    return page_table


def _check_contents(sides: Mapping[str, Side], extents: Extents) -> None:
    """Look at numbers on the device."""
    lengths, table = sides.get("kv_lengths"), sides.get("page_table")
    if isinstance(lengths, torch.Tensor):
        _check_numbers(lengths, room(sides, extents.rows))
        if isinstance(table, torch.Tensor):
            _check_entries(table, lengths, extents)


def _check_entries(table: torch.Tensor, lengths: torch.Tensor, extents: Extents) -> None:
    starts = torch.arange(table.shape[1], device=table.device) * extents.rows
    used = starts < lengths[:, None]
    wrong = (used & ((table < 0) | (table >= extents.outer))).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        raise UnsupportedProblemError(
            f"page_table[{row}, {column}] is {int(table[row, column])}, and there are {extents.outer} pages",
            why=f"batch row {row} has {int(lengths[row])} keys, so that kernels read that page",
            fix="fill the entries of all pages that hold keys",
        )


def _check_numbers(kv_lengths: torch.Tensor, kv_len: int) -> None:
    wrong = ((kv_lengths < 0) | (kv_lengths > kv_len)).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise UnsupportedProblemError(
            f"kv_lengths[{row}] is {int(kv_lengths[row])}, outside of 0 to {kv_len}",
            why=f"key and value have room for {kv_len} keys; kernels clamp the number without saying so",
            fix="pass the number of keys that are written, of this batch row",
        )


def _checked_scale(name: str, scale: Any, extents: Extents) -> Side:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32:
            raise ProblemTypeError(
                f"{name} is {scale.dtype}, not a float32 tensor",
                why="scores and outputs are multiplied by it in float32",
                fix=f"convert it with .to(torch.float32), or pass {name} as a number",
            )
        _check_shape(name, scale, (extents.kv_heads,), "each key/value head has one scale")
        _check_device(name, scale, extents)
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | int | float):
        raise ProblemTypeError(
            f"{name} is {_kind(scale)}, neither a number nor a float32 tensor",
            fix=f"pass a float, or a tensor of shape ({extents.kv_heads},)",
        )
    if not abs(float(scale)) <= torch.finfo(torch.float32).max:
        raise UnsupportedProblemError(f"{name}={scale!r} is not a finite float32 number", fix="pass a finite scale")
    return float(scale)


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != shape:
        raise UnsupportedProblemError(
            f"{name} has shape {tuple(tensor.shape)}, not {shape}", why=why, fix=f"pass a tensor of shape {shape}"
        )


def _check_device(name: str, tensor: torch.Tensor, extents: Extents) -> None:
    refuse_wrapper(name, tensor)
    if tensor.device != extents.device:
        raise UnsupportedProblemError(
            f"{name} is on {tensor.device}, query on {extents.device}", fix=f"move {name} to {extents.device}"
        )


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
