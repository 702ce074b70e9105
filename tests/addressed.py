"""A launcher that runs kernels in the interpreter from plain addresses, as a GPU's launcher does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Addressed:
    """Runs a kernel in the interpreter as a GPU's launcher would: bound, it is given addresses."""

    bound_launches = 0

    def __init__(self, execute: Callable[..., None]) -> None:
        self._execute = execute

    def __call__(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        self._execute(grid, values)

    def bound(self, grid: tuple[int, int, int], values: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        forms = [_form(value) if isinstance(value, torch.Tensor) else None for value in values]

        def launch(plain: Sequence[Any]) -> None:
            Addressed.bound_launches += 1
            self._execute(grid, [_at(v, form) if form else v for v, form in zip(plain, forms, strict=True)])

        return launch


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype)


def _at(address: int, form: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor at an address."""
    assert isinstance(address, int)
    shape, strides, dtype = form
    elements = (
        sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if 0 not in shape else 0
    )
    if not elements:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
