"""One row of facts for each target that flexgen compiles for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexgen.errors import OptionError

TargetBackend = Literal["cuda", "hip", "interpret"]


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about a chip.

    Attributes:
        name: as the user writes it.
        backend: Triton's backend, or "interpret" for Triton's interpreter on CPU.
        arch: Triton's architecture: compute capability times ten, or the gfx name.
        warp_size: threads of a warp (wavefront).
        shared_bytes: shared memory one program may use (the opt-in maximum; LDS on AMD).
        matrix_unit: the instruction family of tl.dot.
        has_tma: whether the bulk tensor copy engine exists.
        has_fast_tanh: whether the tanh.approx instruction exists.
        has_e4m3: whether Triton converts float8_e4m3fn there.
    """

    name: str
    backend: TargetBackend
    arch: int | str
    warp_size: int
    shared_bytes: int
    matrix_unit: Literal["mma", "wgmma", "tcgen05", "mfma", "numpy"]
    has_tma: bool = False
    has_fast_tanh: bool = False
    has_e4m3: bool = True


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (maximum per block);
# LDS: AMD's CDNA 2, 3 and 4 instruction set guides.
_ROWS = (
    Target("sm_80", "cuda", 80, 32, 166912, "mma", has_fast_tanh=True, has_e4m3=False),
    Target("sm_86", "cuda", 86, 32, 101376, "mma", has_fast_tanh=True, has_e4m3=False),
    Target("sm_89", "cuda", 89, 32, 101376, "mma", has_fast_tanh=True),
    Target("sm_90", "cuda", 90, 32, 232448, "wgmma", has_tma=True, has_fast_tanh=True),
    Target("sm_100", "cuda", 100, 32, 232448, "tcgen05", has_tma=True, has_fast_tanh=True),
    Target("sm_120", "cuda", 120, 32, 101376, "mma", has_tma=True, has_fast_tanh=True),
    Target("gfx90a", "hip", "gfx90a", 64, 65536, "mfma"),
    Target("gfx942", "hip", "gfx942", 64, 65536, "mfma"),
    Target("gfx950", "hip", "gfx950", 64, 163840, "mfma"),
    Target("interpret", "interpret", 0, 32, 1 << 40, "numpy", has_tma=True),
)

TARGETS: dict[str, Target] = {row.name: row for row in _ROWS}
DEFAULT_TARGET = "sm_90"  # for commands that only compile, on a machine without a GPU
CONSERVATIVE_TARGET = "sm_80"


def target_named(name: str) -> Target:
    """Return the row of `name`.

    Raises:
        OptionError: for a name without a row.
    """
    if name not in TARGETS:
        raise OptionError(
            f"unknown target {name!r}",
            why="flexgen keeps one row of facts for each chip it compiles for",
            fix=f"choose one of {', '.join(TARGETS)}",
        )
    return TARGETS[name]
