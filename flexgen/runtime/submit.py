"""Hand a loaded kernel to Triton's C launcher with nothing in between, whatever the version of Triton.

Triton's own path from a call to the driver binds arguments by name, keys on every type and value, and builds closures:
tens of microseconds. The compiled C function below it takes the same values as plain integers. Its argument order is
the one thing that differs between versions, so the two orders known (3.6, and 3.7 to 3.9) are spelled here, and
anything else takes Triton's documented `kernel.run`. Triton's launch hooks, which its profiler sets, are not called.

Descriptors are the exception: Triton encodes each at every launch, in Python. What it makes of one is kept with it.

Since 3.8 a CompiledKernel that goes unloads its machine code, so what launches it reads the handle from it each time,
and thereby keeps it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime import _allocation

from flexgen.runtime.compile_ahead import AHEAD
from flexgen.runtime.compile_job import DriverJob

# grid x, y, z, raw stream, one plain value per parameter (addresses as integers)
Submit = Callable[[int, int, int, int, Sequence[object]], None]


def make_submit(kernel: Any, device: int) -> Submit:
    """Return the function that launches a kernel of Triton's, after loading it on the current device.

    Args:
        kernel: Triton's CompiledKernel.
        device: index of the current CUDA device.
    """
    AHEAD.wait(DriverJob.key)
    run = kernel.run  # loads the machine code and builds the C launcher
    instrumented = getattr(run, "profile_scratch_size", 0) or getattr(run, "gsan_enabled", False)
    if instrumented or not hasattr(run, "launch_pdl"):
        return _through_triton(kernel, run, device)
    scratch = _scratch(run, device)
    if hasattr(run, "arg_annotations"):
        return _since_3_7(kernel, run, scratch)
    return _since_3_6(kernel, run, scratch)


def _since_3_6(kernel: Any, run: Any, scratch: Callable[[int], torch.Tensor] | None) -> Submit:
    (launch, expand), packed = _undescribed(run.launch), kernel.packed_metadata
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    def submit(x: int, y: int, z: int, stream: int, values: Sequence[object]) -> None:
        memory = None if scratch is None else scratch(x * y * z)
        if expand is not None:
            values = expand(values)
        launch(
            *(x, y, z, stream, kernel.function, cooperative, dependent),
            *(memory, None, packed, None, None, None, *values),
        )

    return submit


def _since_3_7(kernel: Any, run: Any, scratch: Callable[[int], torch.Tensor] | None) -> Submit:
    (launch, expand), packed = _undescribed(run.launch), kernel.packed_metadata
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    annotations, signature = run.arg_annotations, run.kernel_signature

    def submit(x: int, y: int, z: int, stream: int, values: Sequence[object]) -> None:
        memory = None if scratch is None else scratch(x * y * z)
        if expand is not None:
            values = expand(values)
        launch(
            *(x, y, z, stream, kernel.function, cooperative, dependent, packed),
            *(None, None, None, memory, None, annotations, signature, values),
        )

    return submit


Expand = Callable[[Sequence[object]], list[object]]


def _undescribed(launch: Any) -> tuple[Any, Expand | None]:
    """Return the C function below one that encodes descriptors, and what puts their parts in their places instead.

    Where no argument is a descriptor, and where Triton's way is not known (since 3.8), the same function and None.
    """
    inside = inspect.getclosurevars(launch) if inspect.isfunction(launch) else None
    names = ("launcher", "tensordesc_indices", "tensordesc_meta")
    if inside is None or not all(name in inside.nonlocals for name in names):
        return launch, None
    make = inside.globals.get("make_tensordesc_arg")
    below, indices, about = (inside.nonlocals[name] for name in names)
    if make is None or not about or None in about:
        return launch, None
    # From the last, so that places of earlier ones hold; each with the key of what was made of it.
    places = [(at, tile, object()) for at, tile in sorted(zip(sorted(indices), about, strict=True), reverse=True)]

    def expand(values: Sequence[object]) -> list[object]:
        expanded = list(values)
        for at, tile, key in places:
            descriptor: Any = expanded[at]
            parts = descriptor.parts.get(key)
            if parts is None:
                parts = descriptor.parts[key] = make(descriptor, tile)
            expanded[at : at + 1] = parts
        return expanded

    return below, expand


def _through_triton(kernel: Any, run: Any, device: int) -> Submit:
    """Launch as Triton documents it; slower, and the way for AMD and for versions that are not known here."""
    packed = kernel.packed_metadata

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=f"cuda:{device}")

    def submit(x: int, y: int, z: int, stream: int, values: Sequence[object]) -> None:
        before = _allocation._allocator.set(allocate)
        try:
            run(x, y, z, stream, kernel.function, packed, None, None, None, *values)
        finally:
            _allocation._allocator.reset(before)

    return submit


def _scratch(run: Any, device: int) -> Callable[[int], torch.Tensor] | None:
    """Return the allocator of what a launch of so many programs needs beside its tensors: device-made descriptors.

    None where a kernel makes none.

    The memory comes from torch's caching allocator and belongs to torch's current stream: whoever launches there may
    let go of it after the launch, not before.
    """
    program_bytes = run.global_scratch_size * run.num_ctas
    if not program_bytes:
        return None
    place = torch.device("cuda", device)

    def allocate(programs: int) -> torch.Tensor:
        return torch.empty(programs * program_bytes, dtype=torch.int8, device=place)

    return allocate
