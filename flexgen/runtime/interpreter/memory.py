"""Which bytes an interpreted kernel may touch: one region per tensor argument, checked on every access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flexgen.errors import KernelMemoryError

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """The addresses [start, stop) that one pointer argument of a kernel gives access to."""

    name: str
    start: int
    stop: int

    def check(self, addresses: Addresses, itemsize: int) -> None:
        """Raise KernelMemoryError unless `itemsize` bytes at every address lie inside the region."""
        if not addresses.size:
            return
        lowest, highest = int(addresses.min()), int(addresses.max())
        if lowest < self.start or highest + itemsize > self.stop:
            self._refuse(lowest if lowest < self.start else highest, itemsize)

    def _refuse(self, address: int, itemsize: int) -> None:
        count = (self.stop - self.start) // itemsize
        raise KernelMemoryError(
            f"a kernel touched element {(address - self.start) // itemsize} of {self.name!r}, which has {count}",
            why="the access is outside of the elements that the tensor's sizes and strides reach",
            fix="check the index that the mod computes for a captured tensor against its size",
        )


def tensor_region(name: str, tensor: torch.Tensor) -> Region:
    """Return the bytes that the elements of a CPU tensor span; an expanded tensor's span is that of its storage."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return Region(name, start, start)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Region(name, start, start + (last + 1) * tensor.element_size())


NULL = Region("None", 0, 0)


def region_of(pointer_type: Any) -> Region | None:
    """Return the region that a pointer type of the interpreter carries, if it comes from an argument."""
    return getattr(pointer_type, "region", None)


def bounded_pointer(pointer_type: type, element_type: Any, region: Region) -> Any:
    """Return a pointer type (an instance of Triton's class) that carries its region through arithmetic."""
    bounded = pointer_type(element_type)
    bounded.region = region
    return bounded
