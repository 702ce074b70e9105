"""How a kernel draws which softmax weights it drops."""

from __future__ import annotations

import enum

GROUP_SPAN = 16  # queries and keys that a block of groups covers: each group has two of both, 8 apart


class Draws(enum.Enum):
    """How many (query, key) pairs share a call of the random number generator; the numbers are the same."""

    NONE = "none"  # nothing is dropped
    GROUPED = "grouped"  # four, one for each word that a call returns
    SINGLE = "single"  # one, of which three words are thrown away

    def __str__(self) -> str:
        return self.value
