"""What Triton has a C compiler build before it launches kernels, built before it is needed."""

from __future__ import annotations

from contextlib import suppress

from flexgen.runtime.build import Binary


def build_driver() -> None:
    """Have Triton build and keep its C module that loads kernels on NVIDIA GPUs, which takes over half a second.

    Touches no device. Where it cannot be built here, whoever loads a kernel builds it.
    """
    from triton.backends.nvidia import driver

    with suppress(Exception):
        driver.CudaUtils()


def build_launcher(binary: Binary) -> None:
    """Have Triton build and keep what launches a kernel: 3.6 runs the C compiler for each signature, for half a second.

    Touches no device. Where it cannot be built here, whoever launches builds it.
    """
    if binary.backend != "cuda":
        return
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):  # since 3.7 one function launches all kernels
        return
    with suppress(Exception):
        driver.CudaLauncher(binary.kernel.src, binary.kernel.metadata)
