"""Measure the host time of one kernel launch: flexgen's launcher beside Triton's own. Needs a CUDA device."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable

import torch

from flexgen.lowering.targets import TARGETS
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.launch import Launcher
from flexgen.runtime.load import load_module

# As many arguments as a forward kernel has, and almost nothing to do.
POINTERS, NUMBERS = 8, 16
NAMES = [f"pointer{index}" for index in range(POINTERS)] + [f"number{index}" for index in range(NUMBERS)]
TEXT = f"""import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize={NAMES[POINTERS:]})
def touch({", ".join(NAMES)}):
    tl.store(pointer0, number0)
"""


def microseconds(call: Callable[[], object], repeats: int = 20, launches: int = 200) -> float:
    """Return the median time of one call on the host; the device is idle before each batch, so no queue is full."""
    for _ in range(launches):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            call()
        times.append((time.perf_counter() - start) / launches * 1e6)
    return statistics.median(times)


def main() -> None:
    source = SourceCache(None).keep(hashlib.sha256(TEXT.encode()).hexdigest(), TEXT)
    module = load_module(source)
    major, minor = torch.cuda.get_device_capability()
    types = [ArgType("*i32", True)] * POINTERS + [ArgType("i32")] * NUMBERS
    launcher = Launcher(module, "touch", types, TARGETS[f"sm_{major}{minor}"], num_warps=1, num_stages=1)
    tensor = torch.zeros(16, dtype=torch.int32, device="cuda")
    args = [tensor] * POINTERS + list(range(NUMBERS))
    stream = torch.cuda.current_stream().cuda_stream
    own = microseconds(lambda: launcher.launch((1, 1, 1), args, stream))
    own_stream = microseconds(lambda: launcher.launch((1, 1, 1), args))
    triton_run = microseconds(lambda: module.touch[(1, 1, 1)](*args, num_warps=1, num_stages=1))
    empty = microseconds(lambda: torch.empty(16, device="cuda"))
    print(f"{torch.cuda.get_device_name()}, {POINTERS} pointers and {NUMBERS} numbers, microseconds a call on the host")
    print(f"  flexgen, stream given      {own:6.2f}")
    print(f"  flexgen, stream looked up  {own_stream:6.2f}")
    print(f"  triton's JITFunction       {triton_run:6.2f}")
    print(f"  torch.empty, to compare    {empty:6.2f}")


if __name__ == "__main__":
    main()
