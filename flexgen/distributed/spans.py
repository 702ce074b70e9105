"""Equal chunks of an axis, and ranges of rows of many chunks at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Side:
    """The chunks of one axis: equal parts of its length."""

    name: Literal["q", "kv"]
    length: int
    chunks: int

    @property
    def size(self) -> int:
        return self.length // self.chunks

    def starts(self, device: torch.device) -> Tensor:
        """Return where each chunk begins: int64 [chunks]."""
        return torch.arange(self.chunks, device=device) * self.size


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Half-open ranges, int64 of one shape; empty where lo >= hi."""

    lo: Tensor
    hi: Tensor

    def meet(self, other: Spans) -> Spans:
        return Spans(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def transposed(self) -> Spans:
        return Spans(self.lo.T, self.hi.T)
