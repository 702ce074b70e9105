"""Triton builds C modules before it launches; they are built ahead, beside the kernels, and no failure matters.

One loads kernels; and 3.6 has one more for each kernel, which launches it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.runtime.compile_ahead import PROGRAM
from flexgen.runtime.compile_job import DriverJob
from flexgen.runtime.compile_pool import CompilePool
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


def built_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: Path) -> list[Path]:
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(libraries))
    with CompilePool(1, PROGRAM, bool) as pool:
        assert list(pool.compile([DriverJob()])) == [(0, True)]
    return list((tmp_path / "triton").rglob("cuda_utils*"))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_module_that_loads_kernels_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing.c").write_text("")
    library = tmp_path / "libcuda.so.1"  # what the module is linked with, on a machine with a driver
    subprocess.run(["gcc", "-shared", "-o", str(library), str(tmp_path / "nothing.c")], check=True)
    assert built_by_a_worker(tmp_path, monkeypatch, tmp_path)


def test_where_the_module_that_loads_kernels_cannot_be_built_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not built_by_a_worker(tmp_path, monkeypatch, tmp_path / "nowhere")
