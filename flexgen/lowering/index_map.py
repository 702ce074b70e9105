"""How a tile's physical rows and columns map to logical (b, h, q_idx, kv_idx)."""

from __future__ import annotations

from dataclasses import dataclass

PACKED_QUERIES = 16  # up to this many queries, one head alone leaves a tile's rows unused


@dataclass(frozen=True, slots=True)
class IndexMap:
    """The map of a kernel's tiles.

    Physical row `r` of a program is query `r // packed_heads` of head `kv_head * group + r % packed_heads`;
    with one packed head a program's rows are consecutive queries of one head.

    Attributes:
        packed_heads: query heads interleaved in the rows of one tile: 1, or the whole group.
        has_offsets: logical indices are Q_OFFSET + row and KV_OFFSET + column (decoding, sharded sequences).
        page_size: keys of a page; column `c` is row `c % page_size` of page `page_table[b, c // page_size]`. 0 where
            columns lie one after the other.
    """

    packed_heads: int = 1
    has_offsets: bool = False
    page_size: int = 0

    @property
    def packs(self) -> bool:
        return self.packed_heads > 1


def packs_heads(group: int, q_bucket: int, *, has_table: bool) -> bool:
    """Whether a tile holds the heads of a group: few queries, and one walk over keys for all of them."""
    return group > 1 and 0 < q_bucket <= PACKED_QUERIES and not has_table
