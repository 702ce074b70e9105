"""Triton 3.6 builds a C function to launch each kernel; it is built beside the kernel, and no failure matters."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.runtime.launcher_ahead import build_launcher

pytest.importorskip("triton")

from triton.backends.nvidia import driver

per_kernel = pytest.mark.skipif(not hasattr(driver, "make_launcher"), reason="this Triton has one for all kernels")


def binary():
    tensors = [torch.empty(1, 2, 64, 32, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    return flexgen.compile().lower(*tensors, target="sm_90").binary()


@per_kernel
def test_the_function_that_the_kernel_takes_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(driver, "library_dirs", list)

    class Module:
        launch = None

    monkeypatch.setattr(driver, "compile_module_from_src", lambda src, **named: built.append(src) or Module)
    made = binary()
    build_launcher(made)
    driver.CudaLauncher(made.kernel.src, made.kernel.metadata)  # as `kernel.run` does where it is launched
    assert len(built) == 2 and built[0] == built[1]


@per_kernel
def test_where_it_cannot_be_built_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**named: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(driver, "compile_module_from_src", fail)
    build_launcher(binary())


@pytest.mark.skipif(hasattr(driver, "make_launcher"), reason="this Triton has one for each kernel")
def test_other_versions_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(driver, "CudaLauncher", lambda *given: built.append(given))
    build_launcher(binary())
    assert not built
