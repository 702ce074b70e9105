"""Runs an exported module's host code for a chip that is not in the machine: launches are compiled, or just kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class _Absent:
    """What Triton asks a driver before it compiles a kernel for a call, answered for sm_90."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch: the kernel's name, grid and arguments, and Triton's CompiledKernel, if it was compiled."""

    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    kernel: Any = field(repr=False)


@contextmanager
def launches_kept(*, compiled: bool = False) -> Iterator[list[Launched]]:
    """Keep launches of Triton's kernels instead of making them.

    Args:
        compiled: compile them for sm_90, with Triton's own binder and compiler, as for a call.
    """
    launches: list[Launched] = []
    launch, active = JITFunction.__getitem__, driver._active

    def keep(self: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **options) if compiled else None
            launches.append(Launched(self.fn.__name__, grid, arguments, kernel))

        return call

    driver.set_active(_Absent())
    JITFunction.__getitem__ = keep
    try:
        yield launches
    finally:
        JITFunction.__getitem__ = launch
        driver._active = active
