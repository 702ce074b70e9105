"""One row of facts for each target that flexgen compiles for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flexgen.errors import OptionError
from flexgen.lowering.chips import (
    A100,
    B200,
    CDNA,
    CDNA_4,
    H200,
    MI250X,
    MI300X,
    MI355X,
    MULTIPROCESSOR_80,
    MULTIPROCESSOR_86,
    MULTIPROCESSOR_89,
    MULTIPROCESSOR_90,
    MULTIPROCESSOR_120,
    RTX_3090,
    RTX_4090,
    RTX_5090,
    Chip,
    Multiprocessor,
)

TargetBackend = Literal["cuda", "hip", "interpret"]
MatrixUnit = Literal["mma", "wgmma", "tcgen05", "mfma", "numpy"]


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
        chip: the product whose rates predictions are made with; None for the interpreter.
        multiprocessor: what its programs share; None for the interpreter.
    """

    name: str
    backend: TargetBackend
    arch: int | str
    warp_size: int
    shared_bytes: int
    matrix_unit: MatrixUnit
    has_tma: bool = False
    has_fast_tanh: bool = False
    has_e4m3: bool = True
    chip: Chip | None = field(default=None, repr=False)
    multiprocessor: Multiprocessor | None = field(default=None, repr=False)


def _nvidia(
    arch: int, shared: int, unit: MatrixUnit, chip: Chip, multiprocessor: Multiprocessor, has_tma: bool = False
) -> Target:
    has_e4m3 = arch >= 89  # where the chip's own instructions convert it
    return Target(f"sm_{arch}", "cuda", arch, 32, shared, unit, has_tma, True, has_e4m3, chip, multiprocessor)


# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (maximum per block);
# LDS: AMD's CDNA 2, 3 and 4 instruction set guides.
_ROWS = (
    _nvidia(80, 166912, "mma", A100, MULTIPROCESSOR_80),
    _nvidia(86, 101376, "mma", RTX_3090, MULTIPROCESSOR_86),
    _nvidia(89, 101376, "mma", RTX_4090, MULTIPROCESSOR_89),
    _nvidia(90, 232448, "wgmma", H200, MULTIPROCESSOR_90, has_tma=True),
    _nvidia(100, 232448, "tcgen05", B200, MULTIPROCESSOR_90, has_tma=True),
    _nvidia(120, 101376, "mma", RTX_5090, MULTIPROCESSOR_120, has_tma=True),
    Target("gfx90a", "hip", "gfx90a", 64, 65536, "mfma", chip=MI250X, multiprocessor=CDNA),
    Target("gfx942", "hip", "gfx942", 64, 65536, "mfma", chip=MI300X, multiprocessor=CDNA),
    Target("gfx950", "hip", "gfx950", 64, 163840, "mfma", chip=MI355X, multiprocessor=CDNA_4),
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
