"""Whether a tensor is a DTensor, told without loading torch.distributed."""

from __future__ import annotations

from typing import Any

from flexgen.runtime.wrappers import PLAIN


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is torch.distributed.tensor's DTensor."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
