"""Tensors that stand for others: their class says in Python what operations do, and no data lies at their address."""

from __future__ import annotations

from typing import Any

import torch

from flexgen.errors import UnsupportedProblemError

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a class with a `__torch_dispatch__` of its own, such as torch's AsyncCollectiveTensor."""
    if type(tensor) in PLAIN:
        return False
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def refuse_wrapper(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that a kernel reads by address, where it is a wrapper of another.

    Raises:
        UnsupportedProblemError: it is one.
    """
    if is_wrapper(tensor):
        raise UnsupportedProblemError(
            f"{name} is of {type(tensor).__name__}, a tensor class that stands for other tensors",
            why="kernels read it by address, and its data lies in the tensors that it stands for",
            fix="pass the plain tensor: of an AsyncCollectiveTensor .wait(), of other classes what they wrap",
        )
