"""What a result file says of the run it came from."""

from __future__ import annotations

import os
import platform
import sys
import time

import torch
import triton

import flexgen


def environment(module: str, *, gpu: bool = True) -> dict[str, str]:
    """Return device, date, versions, and the command that ran `benchmarks.module`.

    Args:
        gpu: whether the benchmark runs on one; otherwise the device is this machine.
    """
    machine = f"{platform.machine()}, {os.cpu_count()} cores, no GPU used"
    return {
        "device": torch.cuda.get_device_name() if gpu else machine,
        "date": time.strftime("%Y-%m-%d"),
        "flexgen": flexgen.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]]),
    }


def require_gpu(module: str) -> None:
    """Leave with a message where there is no GPU to run `benchmarks.module` on."""
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks.{module} measures on a CUDA device, and torch finds none here; run it on such a machine")
