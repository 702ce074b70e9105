"""The current device and stream, in less time than torch's objects for them take."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _slow_raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# torch's own shortcut, which Triton uses too; a build of torch without CUDA lacks it.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_raw_stream)


def _slow_device() -> int:
    return int(torch.cuda.current_device())


# The same without checking each time that CUDA is initialised: whoever launches holds tensors there.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _slow_device)
