"""Whether a chip can pass a kernel its arguments: each captured tensor and number is one or more of them."""

from __future__ import annotations

from flexgen.codegen.source import KernelSource, Role
from flexgen.errors import UnsupportedProblemError
from flexgen.lowering.targets import Target

# https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#function-parameters: 32,764 bytes since CUDA 12.1, of
# which Triton takes two addresses.
MOST_BYTES = 32_764 - 16
_WIDE = ("*", "i64", "u64", "fp64")
_CAPTURED = (Role.BUFFER, Role.SCALAR)


def passable(source: KernelSource, target: Target) -> KernelSource:
    """Return a kernel whose arguments the target can pass.

    Raises:
        UnsupportedProblemError: they are too many.
    """
    size = sum(8 if arg.type.startswith(_WIDE) else 4 for arg in source.args)
    if target.backend != "cuda" or size <= MOST_BYTES:
        return source
    captured = len({arg.of for arg in source.args if arg.role in _CAPTURED})
    raise UnsupportedProblemError(
        f"the mods read {captured} captured tensors and numbers, too many for a kernel's arguments",
        why=f"with their sizes and strides they take {size} bytes, and a launch passes {MOST_BYTES} at most",
        fix="put those of one shape into one tensor, with torch.stack, and index that",
    )
