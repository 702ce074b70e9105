"""The two sides of a tile of scores, queries and keys: how a kernel addresses and masks what lies along each."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Pages(enum.Enum):
    """Where the positions of a side lie."""

    NONE = "one after the other"
    OF_TILES = "each tile in one page"
    OF_KEYS = "each position in a page of its own"


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a tile.

    Attributes:
        index: the name of its positions, [BLOCK].
        exists: the name of the condition that a position exists, or "" where all do.
        axis: "q" or "kv", the suffix of strides along it.
        wide: tensors whose offsets along it need 64 bits.
        unit_stride: tensors whose last dimension has stride 1.
        pages: where positions lie; in pages, `page` is theirs and `in_page` their place in it.
    """

    index: str
    exists: str
    axis: str
    wide: Collection[str]
    unit_stride: Collection[str]
    pages: Pages = Pages.NONE

    def address(self, tensor: str, dim: str, head: str = "") -> str:
        """Return the addresses of a tile [BLOCK, head dim] of a tensor.

        Its pointer is at the right batch, and at the right head unless `head` is the offset of each row's head.
        """
        index = self.index if self.pages is Pages.NONE else "in_page"
        if self.pages is not Pages.NONE:
            head += f"page{'[:, None]' if self.pages is Pages.OF_KEYS else ''} * {tensor}_stride_page + "
        position = f"{index}[:, None]" + (".to(tl.int64)" if tensor in self.wide else "")
        along = f"{dim}[None, :]" if tensor in self.unit_stride else f"{dim}[None, :] * {tensor}_stride_d"
        return f"{tensor}_ptr + {head}{position} * {tensor}_stride_{self.axis} + {along}"

    def mask(self, dim_mask: str, *, check: bool = True) -> str:
        """Return the mask of such a tile, "" where none is needed."""
        exists = f"{self.exists}[:, None]" if self.exists and check else ""
        return " & ".join(term for term in (exists, dim_mask) if term)


def dim_mask(dim: str, size: int, rounded: int) -> str:
    """Return the mask of a padded head dim, "" where it is not padded."""
    name = "QK_HEAD_DIM" if dim == "qk_dim" else "V_HEAD_DIM"
    return "" if size == rounded else f"({dim} < {name})[None, :]"
