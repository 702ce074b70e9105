"""Whether tensors are of one form, asked at every call: by torch's own guard, the quickest way, where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class TensorGuard:
    """Knows the form of some tensors: what `tensor_form` says of each but the address.

    Args:
        tensors: of the form.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check = _torch_guard(tensors)
        self._forms = _forms(tensors)

    def passes(self, tensors: Sequence[torch.Tensor]) -> bool:
        # torch's looks at more, such as whether inference_mode is on: what it does not know may still be of the form.
        return (self._check is not None and self._check(*tensors)) or _forms(tensors) == self._forms


def _forms(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(type(it), it.shape, it.stride(), it.dtype, it.get_device(), it.is_meta, it.is_neg()) for it in tensors]


def _torch_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return what compares type, dtype, device, sizes and strides at once; None where this torch has it no more."""
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, SystemError):
        return None
