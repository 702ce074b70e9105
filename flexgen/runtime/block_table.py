"""Read a torch BlockMask into the block table that kernels walk, checking that it fits the data.

Nothing here waits for the device: only shapes, strides, dtypes and devices are looked at, except in
`check_block_table`, which reads the lists and is called on request alone.

Slices. `mask[b, h, rows]` keeps the lists of those rows, but torch replaces its mask_mod by a function that raises,
since the original's counts queries from the original's first one, and leaves `seq_lengths` as they were. Such a mask
means nothing until its mask_mod is set, and until then it is refused. Once the caller has set `mask_mod` (and
`seq_lengths`, if rows were taken) it is a BlockMask like any other: row r of the lists is query block r. A mask
cropped by `_adjust` keeps its mask_mod and is read as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.problem import TableForm

# The block size torch gives to the BlockMask that stands for "no mask": one block, longer than any data.
WHOLE_BLOCK_SIZE = 1 << 30

_REQUIRED = ("seq_lengths", "BLOCK_SIZE", "kv_num_blocks", "kv_indices")
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_SLICED_MASK_MOD = getattr(torch_flex, "_sliced_mask_mod_error", None)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which key blocks each block of queries visits, ready to be passed to a kernel.

    All lists are int32 and expanded to the call's batch and query heads, so a mask dimension of size 1 has stride 0.
    The last dimension has stride 1; the others may have any stride. Entries of an index list past the row's count
    are undefined and must not be read.

    Attributes:
        q_block_size, kv_block_size: the sides of a block.
        mask_batch, mask_heads: the mask's own dimensions: 1 or the batch size, 1 or the number of query heads.
        num_q_blocks: how many rows the data has; lists may hold more.
        num_kv_blocks: how many columns the data has; valid indices are below it.
        kv_num_blocks: [B, Hq, rows], how many blocks of a row need mask_mod.
        kv_indices: [B, Hq, rows, width], their columns.
        full_kv_num_blocks, full_kv_indices: the same for blocks that need no mask_mod, or None.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same lists by columns, for the backward pass,
            or None where the mask was made without them or from trimmed lists, whose columns torch derives short.
    """

    q_block_size: int
    kv_block_size: int
    mask_batch: int
    mask_heads: int
    num_q_blocks: int
    num_kv_blocks: int
    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    q_num_blocks: torch.Tensor | None = None
    q_indices: torch.Tensor | None = None
    full_q_num_blocks: torch.Tensor | None = None
    full_q_indices: torch.Tensor | None = None

    @property
    def has_full_blocks(self) -> bool:
        return self.full_kv_num_blocks is not None

    @property
    def form(self) -> TableForm:
        """What of it decides about a kernel."""
        return TableForm(self.q_block_size, self.kv_block_size, self.has_full_blocks)


@dataclass(frozen=True, slots=True)
class _Extents:
    """What the lists of a table must fit."""

    batch: int
    query_heads: int
    rows: int
    device: torch.device | None


def read_block_mask(
    block_mask: Any,
    *,
    batch: int,
    query_heads: int,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
) -> BlockTable:
    """Return the table of a BlockMask for a call of these extents, without waiting for the device.

    Args:
        block_mask: torch's BlockMask, or any object with its attributes.
        batch: the call's batch size.
        query_heads: the call's number of query heads.
        query_length: the call's number of queries.
        key_length: the call's number of keys.
        device: where the lists must lie; None accepts any, as when only lowering.

    Raises:
        ProblemTypeError: the object is no BlockMask, or its lists are not integers.
        UnsupportedProblemError: the mask was sliced and has no mask_mod, or it was made for other lengths, another
            batch size, another number of heads or another device, or its lists have inconsistent shapes.
    """
    _require_block_mask(block_mask)
    refuse_slice_without_mask_mod(block_mask)
    q_block_size, kv_block_size = _block_sizes(block_mask.BLOCK_SIZE)
    if min(q_block_size, kv_block_size) < WHOLE_BLOCK_SIZE:
        _require_lengths(block_mask, query_length, key_length)
    num_q_blocks, num_kv_blocks = -(-query_length // q_block_size), -(-key_length // kv_block_size)
    by_rows = _Extents(batch, query_heads, num_q_blocks, device)
    by_columns = _Extents(batch, query_heads, num_kv_blocks, device)
    kv_num_blocks, kv_indices = _required_lists(block_mask, by_rows)
    full_kv_num_blocks, full_kv_indices = _lists(block_mask, "full_kv", by_rows)
    q_num_blocks, q_indices = _column_lists(block_mask, "q", by_columns)
    full_q_num_blocks, full_q_indices = _column_lists(block_mask, "full_q", by_columns)
    return BlockTable(
        q_block_size=q_block_size,
        kv_block_size=kv_block_size,
        mask_batch=block_mask.kv_indices.shape[0],
        mask_heads=block_mask.kv_indices.shape[1],
        num_q_blocks=num_q_blocks,
        num_kv_blocks=num_kv_blocks,
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
    )


def check_block_table(table: BlockTable) -> None:
    """Check what the lists say, row by row; waits for the device.

    Raises:
        UnsupportedProblemError: a count is negative or longer than its list, an index names no block of the data, a
            block is listed twice (in one list, or as partial and as full), or the lists by columns disagree with
            those by rows.
    """
    rows, columns = table.num_q_blocks, table.num_kv_blocks
    partial = _visits(table, "kv", table.kv_num_blocks, table.kv_indices, rows, columns)
    _require_transpose(table, "q", partial, table.q_num_blocks, table.q_indices)
    if table.full_kv_num_blocks is None or table.full_kv_indices is None:
        return
    full = _visits(table, "full_kv", table.full_kv_num_blocks, table.full_kv_indices, rows, columns)
    _refuse_any(partial & full, "a block is listed both as partial and as full", "it would be counted twice")
    _require_transpose(table, "full_q", full, table.full_q_num_blocks, table.full_q_indices)


def _require_block_mask(block_mask: Any) -> None:
    missing = [name for name in _REQUIRED if not hasattr(block_mask, name)]
    if missing:
        raise ProblemTypeError(
            f"the block table is a {type(block_mask).__name__}",
            why=f"it has no {', '.join(missing)}",
            fix="pass what flexgen.create_block_mask or torch's create_block_mask returned",
        )


def refuse_slice_without_mask_mod(block_mask: Any) -> None:
    """Refuse a slice of a BlockMask whose mask_mod has not been set."""
    if _SLICED_MASK_MOD is not None and getattr(block_mask, "mask_mod", None) is _SLICED_MASK_MOD:
        raise UnsupportedProblemError(
            "the BlockMask was sliced and has no mask_mod",
            why="the original's mask_mod counts queries, batches and heads from the original's first ones",
            fix="set sliced.mask_mod, shifting the original's indices, and sliced.seq_lengths if you took query rows",
        )


def _block_sizes(sizes: Any) -> tuple[int, int]:
    match sizes:
        case (int() as q_block_size, int() as kv_block_size) if q_block_size > 0 and kv_block_size > 0:
            return q_block_size, kv_block_size
    raise UnsupportedProblemError(
        f"the BlockMask's BLOCK_SIZE is {sizes!r}", fix="give a pair of positive sizes, (query side, key side)"
    )


def _require_lengths(block_mask: Any, query_length: int, key_length: int) -> None:
    made_for = tuple(block_mask.seq_lengths)
    if made_for == (query_length, key_length):
        return
    raise UnsupportedProblemError(
        f"the BlockMask was made for {made_for[0]} queries and {made_for[1]} keys, "
        f"but the call has {query_length} and {key_length}",
        why="a mask of other lengths lists blocks the data lacks, or lacks blocks the data has",
        fix="make the block mask with Q_LEN and KV_LEN of the call; after taking query rows of one, "
        "or after from_kv_blocks without seq_lengths, set block_mask.seq_lengths = (Q_LEN, KV_LEN)",
    )


def _required_lists(block_mask: Any, extents: _Extents) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, indices = _lists(block_mask, "kv", extents)
    if num_blocks is None or indices is None:
        raise UnsupportedProblemError("the BlockMask has no kv_num_blocks", fix="it needs at least the partial blocks")
    return num_blocks, indices


def _lists(block_mask: Any, kind: str, extents: _Extents) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return the counts and indices of one kind ("kv", "full_kv", "q", "full_q"), ready for a kernel, if present."""
    num_blocks = getattr(block_mask, f"{kind}_num_blocks", None)
    indices = getattr(block_mask, f"{kind}_indices", None)
    if num_blocks is None and indices is None:
        return None, None
    if num_blocks is None or indices is None:
        raise UnsupportedProblemError(f"the BlockMask has only one of {kind}_num_blocks and {kind}_indices")
    _require_fitting_shapes(kind, tuple(num_blocks.shape), tuple(indices.shape), extents)
    batch, heads = extents.batch, extents.query_heads
    counts = _ready(f"{kind}_num_blocks", num_blocks, extents.device).expand(batch, heads, -1)
    return counts, _ready(f"{kind}_indices", indices, extents.device).expand(batch, heads, -1, -1)


def _column_lists(
    block_mask: Any, kind: str, extents: _Extents
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    indices = getattr(block_mask, f"{kind}_indices", None)
    if indices is not None and indices.dim() == 4 and indices.shape[2] < extents.rows:
        return None, None
    return _lists(block_mask, kind, extents)


def _require_fitting_shapes(kind: str, counts: tuple[int, ...], indices: tuple[int, ...], extents: _Extents) -> None:
    if len(indices) != 4 or counts != indices[:3]:
        raise UnsupportedProblemError(
            f"{kind}_num_blocks has shape {counts} and {kind}_indices has shape {indices}",
            why="they must be [B, H, rows] and [B, H, rows, width]",
            fix="keep every dimension when slicing: mask[0:1] instead of an index that drops one",
        )
    for name, size, wanted in (("batch", indices[0], extents.batch), ("heads", indices[1], extents.query_heads)):
        if size not in (1, wanted):
            raise UnsupportedProblemError(
                f"the BlockMask's {kind} lists have {size} {name}, but the query has {wanted}",
                why="a mask is either the same along a dimension or given for each of its entries",
                fix=f"make the block mask with {'B' if name == 'batch' else 'H'}=None or {wanted}",
            )
    if indices[2] < extents.rows:
        raise UnsupportedProblemError(
            f"{kind}_indices has {indices[2]} rows of blocks, but the data needs {extents.rows}",
            why="the lists end before the data does, as after taking query rows of a larger mask",
            fix="set block_mask.seq_lengths to the lengths that the remaining rows stand for",
        )


def _ready(name: str, values: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the list as int32 with last stride 1; queued on its device, never waited for."""
    if values.dtype not in _INTEGERS:
        raise ProblemTypeError(f"{name} has dtype {values.dtype}", fix="block lists hold integers, best torch.int32")
    if device is not None and values.device != device:
        raise UnsupportedProblemError(
            f"{name} lies on {values.device}, but the query on {device}",
            fix=f"make the block mask with device={str(device)!r}, or move it: block_mask.to({str(device)!r})",
        )
    if values.dtype != torch.int32:
        values = values.to(torch.int32)
    return values if values.stride(-1) == 1 or values.shape[-1] <= 1 else values.contiguous()


def _visits(
    table: BlockTable, kind: str, num_blocks: torch.Tensor, indices: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """Return bool [mask_batch, mask_heads, rows, columns]: the blocks listed, each at most once."""
    counts = num_blocks[: table.mask_batch, : table.mask_heads, :rows]
    listed = indices[: table.mask_batch, : table.mask_heads, :rows]
    width = listed.shape[-1]
    _refuse_any((counts < 0) | (counts > width), f"a count of {kind}_num_blocks is not in 0..{width}", None)
    used = torch.arange(width, device=listed.device) < counts[..., None]
    outside = used & ((listed < 0) | (listed >= columns))
    _refuse_any(outside.any(-1), f"{kind}_indices names a block that is not in 0..{columns - 1}", None)
    times = torch.zeros(*counts.shape, columns + 1, dtype=torch.int32, device=listed.device)
    times.scatter_add_(-1, torch.where(used, listed, columns).long(), used.to(torch.int32))
    times = times[..., :columns]
    _refuse_any(times > 1, f"{kind}_indices lists a block twice", "it would be counted twice")
    return times > 0


def _require_transpose(
    table: BlockTable, kind: str, visited: torch.Tensor, num_blocks: torch.Tensor | None, indices: torch.Tensor | None
) -> None:
    if num_blocks is None or indices is None:
        return
    by_columns = _visits(table, kind, num_blocks, indices, table.num_kv_blocks, table.num_q_blocks)
    disagree = by_columns.transpose(2, 3) != visited
    _refuse_any(disagree, f"{kind}_indices does not list the blocks that the lists by rows do", None)


def _refuse_any(wrong: torch.Tensor, what: str, why: str | None) -> None:
    """Raise if any entry is set, naming the first: [B, H, row] or [B, H, row, column]."""
    places = wrong.nonzero()
    if len(places) == 0:
        return
    names = ("batch", "head", "row", "column")
    first = ", ".join(f"{name} {index}" for name, index in zip(names, places[0].tolist(), strict=False))
    raise UnsupportedProblemError(
        f"{what}: {first}", why=why, fix="build the mask with flexgen.create_block_mask, or repair the lists"
    )
