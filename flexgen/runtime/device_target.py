"""Which target row a torch device belongs to."""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.lowering.targets import CONSERVATIVE_TARGET, TARGETS, Target


@cache
def target_of(device: torch.device) -> Target:
    """Return the target of a device: the interpreter for the CPU, the chip's row for a GPU.

    A chip without a row gets a conservative one of its family, with one warning.

    Raises:
        UnsupportedProblemError: a device that flexgen has no way to run on.
    """
    if device.type == "cpu":
        return TARGETS["interpret"]
    if device.type != "cuda":
        raise UnsupportedProblemError(
            f"flexgen does not run on device {device}",
            why="kernels run on NVIDIA and AMD GPUs, and on CPU through Triton's interpreter",
            fix="move query, key and value to a GPU or to the CPU; lower(..., target=...) needs no device",
        )
    name = _chip(device)
    if name in TARGETS:
        return TARGETS[name]
    fallback = "gfx90a" if name.startswith("gfx") else CONSERVATIVE_TARGET
    warnings.warn(f"flexgen has no row of facts for {name}; using those of {fallback}", stacklevel=4)
    return _with_arch(TARGETS[fallback], name)


def _chip(device: torch.device) -> str:
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _with_arch(row: Target, name: str) -> Target:
    """Keep the conservative facts, but compile for the chip itself."""
    arch: int | str = name if name.startswith("gfx") else int(name.removeprefix("sm_"))
    return dataclasses.replace(row, name=name, arch=arch)
