"""The captured tensors of a pair of mods: their names, their stand-ins on the meta device, and their `Buffer`s."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexgen.capture.names import NameTable
from flexgen.capture.stand_in import empty_stand_in
from flexgen.errors import CaptureError
from flexgen.ir.graph import Buffer, StrideClass

_REFUSED_DTYPES = (torch.complex32, torch.complex64, torch.complex128)


def stride_class(stride: int) -> StrideClass:
    return "0" if stride == 0 else "1" if stride == 1 else "*"


class CapturedTensors:
    """Registers each captured tensor once, by identity, when a mod first touches it.

    Attributes:
        by_name: the tensors in the order of first touch.
    """

    def __init__(self, wanted_names: Mapping[int, str], names: NameTable) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._wanted = wanted_names
        self._names = names
        self._name_of: dict[int, str] = {}
        self._stand_ins: dict[str, torch.Tensor] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """Return the tensor's name, registering it."""
        known = self._name_of.get(id(tensor))
        if known is None:
            known = self._names.claim(self._wanted.get(id(tensor), "table"), suffix="buffer")
            _check_kind(known, tensor)
            self._name_of[id(tensor)] = known
            self.by_name[known] = tensor
        return known

    def is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._name_of or id(tensor) in self._wanted

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor with the captured one's shape, strides and dtype; one per captured tensor."""
        name = self.name(tensor)
        if name not in self._stand_ins:
            self._stand_ins[name] = empty_stand_in(tensor.size(), tensor.dtype, tensor.stride())
        return self._stand_ins[name]

    def buffer(self, name: str, sizes_read: set[tuple[str, int]]) -> Buffer:
        tensor = self.by_name[name]
        return Buffer(
            name=name,
            dtype=tensor.dtype,
            sizes=tuple(size if (name, i) in sizes_read else None for i, size in enumerate(tensor.shape)),
            strides=tuple(stride_class(stride) for stride in tensor.stride()),
            requires_grad=tensor.requires_grad,
        )

    @property
    def device(self) -> torch.device:
        """The device that a mod sees its inputs on: that of its first captured tensor."""
        first = next(iter(self.by_name.values()), None)
        return torch.device("cpu") if first is None else first.device


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise CaptureError(
            f"captured tensor `{name}` is a nested tensor",
            why="kernels load dense, real tensors.",
            fix="capture its `.values()` and `.offsets()`, or pad it outside the mod: `.to_padded_tensor(0.0)`.",
        )
    if tensor.dtype in _REFUSED_DTYPES or tensor.layout != torch.strided or tensor.is_quantized:
        raise CaptureError(
            f"captured tensor `{name}` is {tensor.dtype} with layout {tensor.layout}",
            why="kernels load dense, real tensors.",
            fix="convert it outside the mod: `.to_dense()`, `torch.view_as_real(...)`, `.dequantize()`.",
        )
    if tensor.is_neg():
        raise CaptureError(
            f"captured tensor `{name}` is a view that torch has yet to negate, as `.conj().imag` is",
            why="kernels load what lies in memory.",
            fix="convert it outside the mod: `.resolve_neg()`.",
        )
