"""How many bytes of registers a thread of a Hopper kernel may spill, by release of Triton.

3.8 has a newer LLVM, which keeps a few addresses more. 3.9 also assembles for sm_90 with the newer of its two
assemblers, and tells it to allocate registers in another way (--regAllocOptLevel=2, around a bug in it): without that
option kernels spill as with 3.8. Each bound is a little over the most that was measured with 3.6.0, 3.7.1, 3.8.0 and
3.9.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Spills:
    """Bytes of spill stores or loads.

    Attributes:
        forward: of a forward kernel, put aside before its loop.
        crowded: of one with three consumer warpgroups, whose threads have 160 registers.
        backward: of a backward kernel; the most where both sums are in registers, at head dim 64.
        busy: of one that evaluates mods or masks for each pair.
        reading: of one that reads a captured tensor for each pair, besides.
    """

    forward: int
    crowded: int
    backward: int
    busy: int
    reading: int


_BY_RELEASE = {
    "3.6": Spills(8, 8, 96, 320, 1664),
    "3.7": Spills(8, 8, 96, 320, 1664),
    "3.8": Spills(40, 8, 96, 320, 1664),
    "3.9": Spills(80, 208, 160, 400, 1664),
}
SPILLS = _BY_RELEASE[".".join(triton.__version__.split(".")[:2])]
