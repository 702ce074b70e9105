"""How a tile's physical rows and columns map to logical (b, h, q_idx, kv_idx)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.problem import Guard, Problem

PACKED_QUERIES = 16  # up to this many queries, one head alone leaves a tile's rows unused


@dataclass(frozen=True, slots=True)
class IndexMap:
    """The map of a kernel's tiles.

    Physical row `r` of a program is query `r // packed_heads` of head `kv_head * group + r % packed_heads`;
    with one packed head a program's rows are consecutive queries of one head.

    Where sequences are packed along the length, a tile lies in one of them: `b` is its number, rows and columns count
    from its first token, and Q_LEN and KV_LEN are its own. A tile searches its sequence: with tiles of BLOCK
    tokens, sequence `i` begins at tile `cu_seqlens[i] // BLOCK + i`, which leaves it as many tiles as its tokens fill,
    or one more. The tokens behind the last sequence are one more sequence, whose other side is empty.

    Attributes:
        packed_heads: query heads interleaved in the rows of one tile: 1, or the whole group.
        has_offsets: logical indices are Q_OFFSET + row and KV_OFFSET + column (decoding, sharded sequences).
        page_size: keys of a page; column `c` is row `c % page_size` of page `page_table[b, c // page_size]`. 0 where
            columns lie one after the other.
        cu_seqlens: dtype of the offsets of packed sequences; None where a sequence is an entry of the batch.
    """

    packed_heads: int = 1
    has_offsets: bool = False
    page_size: int = 0
    cu_seqlens: torch.dtype | None = None

    @property
    def packs(self) -> bool:
        return self.packed_heads > 1

    @property
    def packs_sequences(self) -> bool:
        return self.cu_seqlens is not None


def packs_heads(problem: Problem, guard: Guard) -> bool:
    """Whether a tile holds the heads of a group: few queries, and one walk over keys for all of them."""
    few = 0 < guard.q_bucket <= PACKED_QUERIES
    return problem.group > 1 and few and problem.table is None and problem.cu_seqlens is None
