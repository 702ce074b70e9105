"""Stand-ins: tensors of the meta device, which have a dtype and a shape and no data."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def empty_stand_in(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Return a new stand-in, unseen by the modes that trace."""
    with torch._C._DisableTorchDispatch():
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype, device="meta")
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is a stand-in, else a stand-in of its dtype, shape and strides."""
    return tensor if tensor.is_meta else empty_stand_in(tensor.size(), tensor.dtype, tensor.stride())
