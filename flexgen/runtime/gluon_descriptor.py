"""The copy engine's descriptors of tensors, made on the host, and the submission of kernels that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.runtime.submit import Submit

ANY_STRIDE = 64  # elements: a valid stride for a dimension with one entry, which is never stepped over


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What Triton's launcher reads of a descriptor argument; the tile's shape is part of the compiled kernel.

    Attributes:
        base: the tensor.
        shape, strides: [B, H, L, D] in elements; a dimension that repeats one entry (stride 0) has size 1 here, and
            the kernel addresses it with coordinate 0.
        padding: what elements outside of the shape read as.
    """

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def describe(tensor: torch.Tensor) -> Descriptor:
    """Return the descriptor of a [B, H, L, D] tensor whose last dimension has stride 1."""
    repeated = [stride == 0 for stride in tensor.stride()[:3]]
    shape = [1 if same else size for size, same in zip(tensor.shape, [*repeated, False], strict=True)]
    strides = [
        ANY_STRIDE if size == 1 else stride for size, stride in zip(shape[:3], tensor.stride()[:3], strict=True)
    ]
    return Descriptor(tensor, shape, [*strides, 1])


def submit_described(submit: Submit, positions: Sequence[int]) -> Submit:
    """Return a submission that describes the tensors at `positions` first."""

    def described(x: int, y: int, z: int, stream: int, values: Sequence[Any]) -> None:
        given = list(values)
        for position in positions:
            given[position] = describe(given[position])
        submit(x, y, z, stream, given)

    return described
