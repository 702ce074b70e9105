"""The copy engine's descriptors of tensors, as the host gives them to a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

ANY_STRIDE = 64  # elements: a valid stride for a dimension with one entry, which is never stepped over
MOST_KEPT = 64  # descriptors of one form, by address: the caching allocator hands out the same few again and again


class HasAddress(Protocol):
    def data_ptr(self) -> int: ...


class Address:
    """Memory of which only the address is known, so that nothing is kept alive."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True, slots=True, eq=False)
class Descriptor:
    """A tensor described; what Triton's launcher reads of such an argument, the tile being part of the kernel.

    Attributes:
        base: the tensor, of which the address is used.
        shape, strides: in elements, the last stride being 1.
        padding: what elements outside of the shape read as.
        round_f32_to_tf32: asked for by Triton 3.7; what is float32 here, one number a row, keeps its bits.
        parts: what launchers made of it, each under a key of its own.
    """

    base: HasAddress
    shape: list[int]
    strides: list[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False
    parts: dict[object, list[Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class DescriptorForm:
    """Everything of a descriptor but the address.

    Attributes:
        shape, strides: [B, H, L, D] in elements; a dimension that repeats one entry (stride 0) has size 1 here, and
            the kernel addresses it with coordinate 0. Or [B * H * L] of one number a row.
    """

    shape: list[int]
    strides: list[int]
    _kept: dict[int, Descriptor] = field(default_factory=dict, repr=False, compare=False)

    def of(self, tensor: torch.Tensor) -> Descriptor:
        return Descriptor(tensor, self.shape, self.strides)

    def at(self, address: int) -> Descriptor:
        """Return the descriptor of memory at an address: the same one again, while it is kept."""
        found = self._kept.get(address)
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            found = self._kept[address] = Descriptor(Address(address), self.shape, self.strides)
        return found


def descriptor_form(tensor: torch.Tensor) -> DescriptorForm:
    """Return the form of a [B, H, L, D] tensor whose last dimension has stride 1, or of contiguous [B, H, L] rows."""
    if tensor.dim() == 3:
        return DescriptorForm([tensor.numel()], [1])
    outer = list(zip(tensor.shape[:3], tensor.stride()[:3], strict=True))
    shape = [1 if stride == 0 else size for size, stride in outer]
    strides = [ANY_STRIDE if size == 1 else stride for size, (_, stride) in zip(shape, outer, strict=True)]
    return DescriptorForm([*shape, tensor.shape[3]], [*strides, 1])
