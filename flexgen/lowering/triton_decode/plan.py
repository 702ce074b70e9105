"""The plan of a decode kernel and of the kernel that combines its splits."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.lowering.targets import Target
from flexgen.lowering.triton.plan import ForwardPlan

STATISTICS = 4  # elements after a partial row: its maximum and its sum, padded so that rows stay aligned


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """The plan of the kernel that combines the splits of rows, one row a program.

    Attributes:
        COMBINE_SPLITS: splits that are combined at a time.
    """

    target: Target
    COMBINE_SPLITS: int
    num_warps: int

    @property
    def BLOCK_M(self) -> int:
        """Rows of a program."""
        return 1

    @property
    def compile_options(self) -> dict[str, int]:
        """Return the options Triton's compiler takes besides the source."""
        return {"num_warps": self.num_warps, "num_stages": 1}


@dataclass(frozen=True, slots=True)
class DecodePlan(ForwardPlan):
    """Template variables of a decode kernel: those of the forward kernel, and of the splits of its keys.

    Attributes:
        SPLIT_KV: the number of splits that was asked for; None where each launch counts for itself.
        LIVE_KEYS: a row never has more live keys than this; None where nothing is known.
        held: programs that a multiprocessor holds at a time.
        resident: programs of a multiprocessor that the number of splits counts on.
        COMBINE_SPLITS: splits of a row that are combined at a time.
        combine_warps: warps of a program of the combining kernel.
    """

    SPLIT_KV: int | None
    LIVE_KEYS: int | None
    held: int
    resident: int
    COMBINE_SPLITS: int
    combine_warps: int

    @property
    def combining(self) -> CombinePlan:
        """Return the plan of the combining kernel."""
        return CombinePlan(self.target, self.COMBINE_SPLITS, self.combine_warps)

    @property
    def PARTIAL_WIDTH(self) -> int:
        """Elements between two partial rows in scratch memory."""
        return -(-self.V_HEAD_DIM // STATISTICS) * STATISTICS + STATISTICS
